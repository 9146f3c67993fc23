import fluidx as fluid

fluid.install_check.run_check()
