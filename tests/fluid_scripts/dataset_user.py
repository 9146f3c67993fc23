# refused: read the files in a generator: io.DataLoader.from_generator
import fluidx as fluid

dataset = fluid.DatasetFactory().create_dataset("InMemoryDataset")
dataset.set_batch_size(4)
