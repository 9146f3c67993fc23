"""The network interface that ranks use between hosts."""

import pytest

from fluidx.comm.tcp import interfaces
from fluidx.config import ConfigError


def test_an_interface_is_chosen_by_its_name_or_its_address(monkeypatch):
    monkeypatch.setenv("FLUIDX_INTERFACE", "")
    assert interfaces.chosen() is None
    for name in ("lo", "127.0.0.1", "127.0.0.7"):
        monkeypatch.setenv("FLUIDX_INTERFACE", name)
        assert interfaces.chosen() == ("127.0.0.1" if name == "lo" else name)
    for name in ("eth77", "192.0.2.1"):
        monkeypatch.setenv("FLUIDX_INTERFACE", name)
        with pytest.raises(ConfigError, match=rf"has no interface '{name}'; its interfaces are (.*, )?lo \(127\.0\.0\.1\)"):
            interfaces.chosen()
