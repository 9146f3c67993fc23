"""One training step of four models: fluidx against PyTorch and JAX, on 1 and on 2 threads.

All peers of a case are alive in one interleaved run, each in a process of its own (`_peers.py`), on the same model, the same starting
values and the same batch (`_models.py`); one whose losses of the first three steps differ is named and not compared. A figure is one step:
the median over the steps of all rounds, with minimum and upper quartile. fluidx and JAX copy the batch in on every step, PyTorch works on
it in place; all give back the loss as a number.

    --models mlp,lenet,resnet,gpt (and heads: attention alone)   --threads 1,2   --rounds 20   --seconds 0.3 (a turn)   --save
    --peers fluidx,torch_best,...   also fluidx_numpy; torch_compile, one of them, needs a C++ compiler and a minute a case
    --precision bfloat16   mixed precision of fluidx against PyTorch's autocast, and both in float32
"""

from __future__ import annotations

from _common import Log, choice
from _models import HALF_TOLERANCE, TOLERANCE, TRAINED
from _peers import TRAIN, TRAIN_HALF
from _races import report


def main() -> None:
    half = choice("precision", "float32", "bfloat16") == "bfloat16"
    log = Log("train_bfloat16" if half else "train")
    if half:
        log(f"losses of 3 steps agree within {HALF_TOLERANCE:g}, relative: frameworks round to bfloat16 in other places")
    else:
        most, resnet = TOLERANCE["mlp"], TOLERANCE["resnet"]
        log(f"losses of 3 steps agree within {most:g}, relative: other orders of summation; ResNet within {resnet:g}:")
        log("a value next to 0 changes sign under relu, and batch normalization spreads it")
    report(log, "train", ",".join(TRAINED), ",".join(TRAIN_HALF if half else TRAIN))
    log.close()


if __name__ == "__main__":
    main()
