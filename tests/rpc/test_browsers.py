"""Which requests of pages in a browser a listener without a token rejects."""

import pytest

from persia_torchrec.rpc.browsers import AllowedHosts

HERE = AllowedHosts("127.0.0.1", ["proxy.example", "[fd00::2]"])


def why(hosts, method="GET", **headers):
    by_name = {name.replace("_", "-"): value for name, value in headers.items()}
    return hosts.why_rejected(method, by_name.get)


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "localhost:8080", "LocalHost.", "127.0.0.1", "127.0.0.1:80"),
        *("127.1.2.3", "[::1]", "[::1]:8080", "proxy.example", "Proxy.Example:443"),
        *("[fd00::2]:80", None),
    ],
)
def test_the_loopback_and_what_a_proxy_passes_on_may_be_named(host):
    headers = {} if host is None else {"Host": host}
    assert why(HERE, **headers) == why(HERE, "POST", **headers) == ""


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8080", "localhost.evil.example", "10.0.0.1"),
        *("127.0.0.1.evil.example", "evil.example@127.0.0.1.x", "", "[", "[::1", ":80"),
        *("0.0.0.0", "[::]", "2130706433", "a" * 5000),
    ],
)
def test_another_host_is_rejected_with_the_reason(host):
    for method in ("GET", "POST"):
        text = why(HERE, method, Host=host)
        assert "The header Host must be of this host's loopback" in text
        assert "--allowed-hosts" in text
        assert len(text) < 600


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "https://evil.example:8080"},
        {"Origin": "null"},
        {"Origin": "file://"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Origin": "http://localhost:8080", "Sec_Fetch_Site": "cross-site"},
    ],
)
def test_a_page_of_another_site_cannot_change_anything(headers):
    for method in ("POST", "PUT", "DELETE"):
        text = why(HERE, method, Host="localhost:8080", **headers)
        assert text.startswith(("The header Origin", "The header Sec-Fetch-Site"))
    assert why(HERE, Host="localhost:8080", **headers) == ""  # it cannot read that


def test_a_page_of_this_host_can():
    own = {"Origin": "http://localhost:3000", "Sec_Fetch_Site": "same-site"}
    assert why(HERE, "POST", Host="localhost:8080", **own) == ""


@pytest.mark.parametrize(
    "hosts",
    [
        AllowedHosts("127.0.0.1", is_any=True),
        AllowedHosts("10.0.0.1"),
        AllowedHosts("0.0.0.0"),
        AllowedHosts(""),
    ],
)
def test_with_a_token_and_for_others_any_host_may_be_named(hosts):
    assert why(hosts, "POST", Host="evil.example", Origin="http://evil.example") == ""


def test_hosts_are_added():
    hosts = AllowedHosts("::1")
    assert why(hosts, Host="proxy.example")
    other = AllowedHosts("::1")
    other.add(["proxy.example"])
    assert why(other, Host="proxy.example") == ""
