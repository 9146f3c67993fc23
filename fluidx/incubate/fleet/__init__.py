"""fluid.incubate.fleet: training in several processes that a launcher started, `fluidx run -n 4 --backend processes train.py`."""
