"""Which header of a client has a token, and of what rights."""

import base64

import pytest

from persia_torchrec import env
from persia_torchrec.errors import ConfigError
from persia_torchrec.rpc.http_tokens import HttpTokens

CLIENT, ADMIN = "a-token-of-clients", "a-token-of-admins"


def basic(text):
    return f"Basic {base64.b64encode(text.encode()).decode()}"


def test_any_header_is_compared():
    tokens = HttpTokens(CLIENT, ADMIN)
    wrong = ("", "Bearer", f"bearer {CLIENT}", f"Bearer {CLIENT} ", "Bearer \xff")
    for given in (*wrong, "Basic ?", "Basic /w==", basic(CLIENT), basic(f"{CLIENT}:")):
        rejected = tokens.why_rejected(given)
        assert rejected is not None
        assert rejected.status == 401


@pytest.mark.parametrize("token", [CLIENT, ADMIN])
def test_a_token_is_a_bearers_or_a_password(token):
    tokens = HttpTokens(CLIENT, ADMIN)
    for given in (f"Bearer {token}", basic(f"anyone:{token}")):
        assert tokens.why_rejected(given) is None
        rejected = tokens.why_rejected(given, changes=True)
        assert (rejected and rejected.status) == (403 if token is CLIENT else None)


def test_the_second_token_is_another(monkeypatch):
    monkeypatch.setenv("PERSIA_HTTP_TOKEN", CLIENT)
    for token in (CLIENT, env.job_token()):
        monkeypatch.setenv("PERSIA_HTTP_ADMIN_TOKEN", token)
        with pytest.raises(ConfigError, match="ADMIN_TOKEN must be another token than"):
            HttpTokens.of_environment()
