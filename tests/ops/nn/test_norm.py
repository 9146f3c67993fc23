"""norm and lrn against numbers worked by hand."""

import numpy as np

from fluidx.ops.nn.norm import Lrn, Norm


def test_norm_gives_length_one(run_bound):
    y, length = run_bound(Norm, np.array([[3, 4], [0, 0]], "float32"), axis=1)
    assert length[0, 0] == 5
    np.testing.assert_allclose(y, [[0.6, 0.8], [0, 0]], rtol=1e-6)


def test_lrn_worked_by_hand(run_bound):
    x = np.array([1, 2, 3], "float32").reshape(1, 3, 1, 1)
    y, mid = run_bound(Lrn, x, n=3, k=1.0, alpha=1.0, beta=1.0)
    assert mid.reshape(-1).tolist() == [6, 15, 14]
    np.testing.assert_allclose(y.reshape(-1), [1 / 6, 2 / 15, 3 / 14], rtol=1e-6)
