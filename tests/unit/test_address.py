from __future__ import annotations

import socket
from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pml.address import DEFAULT_PORTS, MAX_LENGTH, Address, end_address, join_host_port, split_host_port
from p2pml.errors import AddressError


@pytest.mark.parametrize(
    ("text", "address", "canonical"),
    [
        ("tcp://10.0.0.2:7700", Address("tcp", "10.0.0.2", 7700), None),
        ("tcp://host", Address("tcp", "host", 7700), "tcp://host:7700"),
        ("TCP://host:1", Address("tcp", "host", 1), "tcp://host:1"),
        ("tcp://[::1]:7700", Address("tcp", "::1", 7700), None),
        ("tcp://[::1]", Address("tcp", "::1", 7700), "tcp://[::1]:7700"),
        ("tcp://[2001:DB8:0::1]:0", Address("tcp", "2001:db8::1", 0), "tcp://[2001:db8::1]:0"),
        ("tcp://[fe80::1%eth0]:7700", Address("tcp", "fe80::1%eth0", 7700), None),
        ("tcp://:7700", Address("tcp", "", 7700), None),
        ("tcp://:0", Address("tcp", "", 0), None),
        ("tcp://[::]:65535", Address("tcp", "::", 65535), None),
        ("ws://host:8080/p2pml", Address("ws", "host", 8080, "/p2pml"), None),
        ("ws://host/p2pml", Address("ws", "host", 80, "/p2pml"), "ws://host:80/p2pml"),
        ("wss://host/a?b=c", Address("wss", "host", 443, "/a?b=c"), "wss://host:443/a?b=c"),
        ("memory://a", Address("memory", "a"), None),
        ("memory://a/b", Address("memory", "a", None, "/b"), None),
        ("ble://p2pml-3f", Address("ble", "p2pml-3f"), None),
        ("ble://AA:BB:CC:DD:EE:FF", Address("ble", "AA:BB:CC:DD:EE:FF"), None),
        ("shaped+x://host:1/y", Address("shaped+x", "host:1", None, "/y"), None),
    ],
)
def test_reading_and_writing(text: str, address: Address, canonical: str | None) -> None:
    assert Address.parse(text) == address
    assert str(address) == canonical or str(address) == text
    assert Address.parse(str(address)) == address


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "no scheme"),
        ("host", "no scheme"),
        ("10.0.0.2:7700", r"did you mean 'tcp://10\.0\.0\.2:7700'"),
        ("[::1]:7700", r"did you mean 'tcp://\[::1\]:7700'"),
        ("://host", "is not a scheme"),
        ("1tcp://host", "is not a scheme"),
        ("tçp://host", "is not a scheme"),
        ("tcp:/host:7700", "no scheme"),
        ("tcp://", "nothing follows"),
        ("memory://", "nothing follows"),
        ("ws:///path", "nothing follows"),
        ("tcp://host:", "the port is ''"),
        ("tcp://host:port", "the port is 'port'"),
        ("tcp://host:-1", "the port is '-1'"),
        ("tcp://host:+1", r"the port is '\+1'"),
        ("tcp://host:1_0", "the port is '1_0'"),
        ("tcp://host:٣", "the port is '٣'"),
        ("tcp://host:65536", "not a number from 0 to 65535"),
        ("tcp://host:" + "9" * 400, "not a number from 0 to 65535"),
        ("tcp://host:1/path", "has no path"),
        ("tcp://host:1/", "has no path"),
        ("tcp://a b:1", "spaces"),
        ("tcp://host:1\n", "spaces"),
        ("memory://a\0", "control characters"),
        ("tcp://[::1:7700", "not closed"),
        ("tcp://[::1]7700", "follows the bracket"),
        ("tcp://[]:1", "not an IPv6 address"),
        ("tcp://[10.0.0.2]:1", "not an IPv6 address"),
        ("tcp://[::1%]:1", "not an IPv6 address"),
        ("tcp://::1:7700", "stands in brackets"),
        ("tcp://::1]:7700", "stands in brackets"),
        ("tcp://user@host:1", "not a host name"),
        ("tcp://10.0.0.256:1", "not an IPv4 address"),
        ("tcp://7700", "not an IPv4 address"),
        ("x" * (MAX_LENGTH + 1), f"at most {MAX_LENGTH} characters"),
    ],
)
def test_what_is_wrong_with_it(text: str, complaint: str) -> None:
    with pytest.raises(AddressError, match=complaint) as wrong:
        Address.parse(text)
    assert repr(text)[1:20].rstrip("'") in str(wrong.value)


@pytest.mark.parametrize(
    ("text", "loopback"),
    [
        ("tcp://127.3.2.1", True),
        ("tcp://[::1]", True),
        ("tcp://LocalHost", True),
        ("memory://a", True),
        ("tcp://:1", False),
        ("tcp://0.0.0.0", False),
        ("tcp://10.0.0.2", False),
        ("tcp://localhost.example.org", False),
        ("ble://localhost", False),
    ],
)
def test_loopback(text: str, loopback: bool) -> None:
    assert Address.parse(text).is_loopback is loopback


def test_ends_of_a_pipe() -> None:
    assert end_address("tcp", ("10.0.0.2", 1)) == Address("tcp", "10.0.0.2", 1)
    assert end_address("ws", ("::1", 1, 0, 0)) == Address("ws", "::1", 1)
    index, name = socket.if_nameindex()[0]
    assert end_address("tcp", ("fe80::1", 1, 0, index)) == Address("tcp", f"fe80::1%{name}", 1)
    assert end_address("tcp", (f"fe80::1%{name}", 1, 0, index)) == Address("tcp", f"fe80::1%{name}", 1)
    assert end_address("memory", "memory://a/dial-1") == Address("memory", "a", None, "/dial-1")
    assert end_address("tcp", None) is None


visible = st.characters(exclude_categories=("C", "Z"))
names = st.text(st.characters(categories=("L", "N"), include_characters="-_."), min_size=1, max_size=40)
hosts = st.one_of(
    names.filter(lambda name: any(letter not in "0123456789." for letter in name)),
    st.ip_addresses().map(str),
    st.builds("fe80::{:x}%{}".format, st.integers(1, 0xFFFF), st.text("etwlanp0123456789", min_size=1, max_size=8)),
)
paths = st.just("") | st.text(visible, max_size=30).map("/{}".format)
schemes = st.from_regex(r"\A[a-z][a-z0-9+.-]{0,10}\Z").filter(lambda scheme: scheme not in DEFAULT_PORTS)
addresses = st.one_of(
    st.builds(Address, st.just("tcp"), st.just("") | hosts, st.integers(0, 65535)),
    st.builds(Address, st.sampled_from(["ws", "wss"]), hosts, st.integers(0, 65535), paths),
    st.builds(
        Address, schemes, st.text(visible, min_size=1, max_size=40).filter(lambda t: "/" not in t), st.none(), paths
    ),
)


@given(addresses)
def test_every_address_survives_its_text(address: Address) -> None:
    assert Address.parse(str(address)) == address


@given(st.text(max_size=60) | st.builds("tcp://{}".format, st.text("[]:.%/@0123456789abf", max_size=30)))
def test_any_text_is_an_address_or_an_address_error(text: str) -> None:
    try:
        address = Address.parse(text)
    except AddressError:
        return
    assert Address.parse(str(address)) == address


@given(st.ip_addresses(), st.integers(0, 65535))
def test_host_and_port(host: IPv4Address | IPv6Address, port: int) -> None:
    assert split_host_port(join_host_port(str(host), port)) == (str(host), port)
