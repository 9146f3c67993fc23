"""`make attack`: random mutants, programs, operands and broken files, from a seed. What goes wrong is printed with what tries it again."""
