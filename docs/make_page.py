"""The example of a page that shows a program, made while the documentation is built (see hooks.py)."""

from __future__ import annotations

import fluidx as fx

BLOCKS, WIDTH = 6, 32


def transpiled() -> fx.DistributeTranspiler:
    """A small network of alike blocks, trained by zero1 on four ranks."""
    main, startup = fx.Program("example"), fx.Program("example_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x, label = fx.data("x", [-1, 64], "float32"), fx.data("label", [-1, 1], "int64")
        h = fx.layers.fc(x, WIDTH, act="relu", param_attr="first_w", bias_attr="first_b")
        for k in range(BLOCKS):
            with fx.name_scope(f"block{k}"):
                inner = fx.layers.fc(h, 4 * WIDTH, act="relu", param_attr=f"up{k}_w", bias_attr=f"up{k}_b")
                h = fx.layers.elementwise_add(h, fx.layers.fc(inner, WIDTH, param_attr=f"down{k}_w", bias_attr=f"down{k}_b"))
        logits = fx.layers.fc(h, 10, param_attr="last_w", bias_attr="last_b")
        fx.optimizer.Momentum(0.1, 0.9).minimize(fx.layers.mean(fx.layers.softmax_with_cross_entropy(logits, label)))
    return fx.DistributeTranspiler("zero1").transpile(program=main, startup_program=startup, trainers=4)


def page() -> str:
    return fx.view.html(transpiled())
