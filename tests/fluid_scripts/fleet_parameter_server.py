# refused: they are ranks of one job: fx.DistributeTranspiler(fx.strategies.parameter_server(2))
from fluidx.incubate.fleet.parameter_server.distribute_transpiler import fleet

fleet.init()
