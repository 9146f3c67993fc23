"""A small character-level GPT on text that every Python carries (pydoc_data.topics), on 1 device and on N ranks."""

from pydoc_data.topics import topics

import numpy as np
from common import Feed, Model, compare

import fluidx as fx

CONTEXT, WIDTH, HEADS, LAYERS = 32, 64, 4, 2


def text() -> tuple[np.ndarray, int]:
    """The topics as character numbers, rare characters dropped, and the number of characters."""
    raw = "\n".join(topics[k] for k in sorted(topics))
    alphabet = sorted(c for c in set(raw) if raw.count(c) > 100)
    index = {c: i for i, c in enumerate(alphabet)}
    return np.array([index[c] for c in raw if c in index], dtype="int64"), len(alphabet)


def attention(x):
    """Causal self-attention: every position looks at itself and those before it."""
    qkv = fx.layers.fc(x, 3 * WIDTH, num_flatten_dims=2)
    q, k, v = (
        fx.layers.transpose(fx.layers.reshape(part, [0, CONTEXT, HEADS, WIDTH // HEADS]), [0, 2, 1, 3])
        for part in fx.layers.split(qkv, 3, dim=2)
    )
    mixed = fx.layers.scaled_dot_product_attention(q, k, v, causal=True)
    joined = fx.layers.reshape(fx.layers.transpose(mixed, [0, 2, 1, 3]), [0, CONTEXT, WIDTH])
    return fx.layers.fc(joined, WIDTH, num_flatten_dims=2)


def build(seed: int = 1, state_dtype: str = "float32") -> Model:
    data, characters = text()
    cut = len(data) * 9 // 10
    main, startup = fx.Program("char_gpt"), fx.Program("char_gpt_startup")
    main.random_seed = startup.random_seed = seed
    with fx.program_guard(main, startup):
        tokens = fx.data("tokens", [-1, CONTEXT], "int64")
        targets = fx.data("targets", [-1, CONTEXT, 1], "int64")
        small = fx.initializer.Normal(0.0, 0.02)
        places = fx.layers.create_parameter([CONTEXT, WIDTH], "float32", name="places", default_initializer=small)
        x = fx.layers.embedding(fx.layers.unsqueeze(tokens, [2]), [characters, WIDTH], param_attr=small)
        x = fx.layers.elementwise_add(x, places)
        for _ in range(LAYERS):
            x = x + attention(fx.layers.layer_norm(x, begin_norm_axis=2))
            h = fx.layers.fc(fx.layers.layer_norm(x, begin_norm_axis=2), 4 * WIDTH, num_flatten_dims=2, act="gelu")
            x = x + fx.layers.fc(h, WIDTH, num_flatten_dims=2)
        logits = fx.layers.fc(fx.layers.layer_norm(x, begin_norm_axis=2), characters, num_flatten_dims=2)
        loss = fx.layers.mean(fx.layers.softmax_with_cross_entropy(logits, targets))
        clip = fx.clip.GradientClipByGlobalNorm(1.0)
        fx.optimizer.Adam(learning_rate=0.003, grad_clip=clip, state_dtype=state_dtype).minimize(loss)

    def windows(part: np.ndarray, count: int, seed: int) -> Feed:
        at = np.random.default_rng(seed).integers(0, len(part) - CONTEXT - 1, count)
        block = np.stack([part[k : k + CONTEXT + 1] for k in at])
        return {"tokens": block[:, :-1], "targets": block[:, 1:, None]}

    return Model(
        main, startup, loss, {"test loss": loss},
        lambda epoch: (windows(data[:cut], 16, 100 * epoch + k) for k in range(50)), windows(data[cut:], 64, 7),
    )  # fmt: skip


if __name__ == "__main__":
    compare("character GPT on pydoc topics", build, epochs=2)
