"""What `fluidx onnx train` consists of: files of examples, feeds for a model, scores, the loop over epochs, and curves."""
