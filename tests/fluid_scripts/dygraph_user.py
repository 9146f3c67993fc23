# refused: programs are static graphs: write layers under program_guard, and run them with Executor
import fluidx as fluid

with fluid.dygraph.guard():
    x = fluid.dygraph.to_variable([1.0])
