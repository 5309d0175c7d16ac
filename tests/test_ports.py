"""A port is free, and stays so while a server loads its model."""
import socket

import pytest

from swift_megatron_grpo import ports


def test_a_port_is_free_and_none_that_outgoing_connections_get(monkeypatch):
    for _ in range(20):
        port = ports.free_port()
        assert 15_000 <= port < ports._first_of_outgoing()
        with socket.socket() as server:
            server.bind(('127.0.0.1', port))
            monkeypatch.setattr(ports, '_FIRST', port)
            monkeypatch.setattr(ports, '_first_of_outgoing', lambda port=port: port + 1)
            assert ports.free_port() != port  # the only one of the range is taken
        monkeypatch.undo()


@pytest.mark.parametrize(('content', 'first'), [('32768\t60999\n', 32768), ('1024 65535', 1024), ('', 32768), ('many', 32768)])
def test_the_range_of_outgoing_connections_is_read_from_the_system(content, first, tmp_path, monkeypatch):
    monkeypatch.setattr(ports, '_RANGE_FILE', tmp_path / 'range')
    (tmp_path / 'range').write_text(content)
    assert ports._first_of_outgoing() == first
    with socket.socket() as server:
        server.bind(('127.0.0.1', ports.free_port()))
