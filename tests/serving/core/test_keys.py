# SPDX-License-Identifier: Apache-2.0
"""Keys let in whom they name, and nothing ever shows a token."""

import hashlib
import hmac
import logging
import subprocess

import pytest

from metrale_jax.core.errors import ConfigError
from serving.core import keys as keys_module
from serving.core.errors import Kind, ServiceError
from serving.core.keys import KeyLimits, KeyRing

ALICE, BOB = "alice-0123456789-secret", "bob-0123456789-secret"


def written(tmp_path, text, mode=0o600):
    path = tmp_path / "keys.toml"
    path.write_text(text)
    path.chmod(mode)
    return path


def entry(key_id, token, more=""):
    return f'[[keys]]\nid = "{key_id}"\ntoken = "{token}"\n{more}\n'


def ring(tmp_path, more=""):
    return KeyRing.open(written(tmp_path, entry("alice", ALICE, more) + entry("bob", BOB)))


def test_only_who_is_called_admin_may_change_models(tmp_path):
    keys = ring(tmp_path, "admin = true")
    assert keys.authenticate(ALICE, "").admin and not keys.authenticate(BOB, "").admin
    assert not KeyRing.anonymous().authenticate(None, "127.0.0.1").admin
    with pytest.raises(ConfigError, match="admin is not true or false"):
        ring(tmp_path, 'admin = "yes"')


def test_a_token_is_its_holder_and_other_ones_are_nobody(tmp_path):
    keys = ring(tmp_path, "requests_per_minute = 3\nmax_concurrent = 2")
    caller = keys.authenticate(ALICE, "ipv4:1.2.3.4:5")
    assert (caller.key_id, caller.peer) == ("alice", "ipv4:1.2.3.4:5")
    assert keys.authenticate(BOB, "").key_id == "bob"
    assert keys.limits_of("alice") == KeyLimits(requests_per_minute=3, max_concurrent=2)
    assert keys.limits_of("bob") == KeyLimits()
    for token in (None, "", ALICE[:-1], ALICE + "x", ALICE.upper(), "alice-\udcff", "é" * 30):
        with pytest.raises(ServiceError) as told:
            keys.authenticate(token, "")
        assert told.value.kind is Kind.UNAUTHENTICATED
        assert not token or token not in str(told.value)


def test_a_digest_from_sha256sum_does_as_well_as_the_token(tmp_path):
    digest = subprocess.run(["sha256sum"], input=ALICE.encode(), capture_output=True, check=True).stdout.split()[0]
    text = f'[[keys]]\nid = "alice"\ntoken_sha256 = "{digest.decode()}"\n'
    caller = KeyRing.open(written(tmp_path, text)).authenticate(ALICE, "")
    assert caller == ring(tmp_path).authenticate(ALICE, ""), "and the cached prefixes are the same ones"


def test_salts_part_keys_last_over_restarts_and_are_no_token(tmp_path):
    first, again = (ring(tmp_path).authenticate(ALICE, "").salt for _ in range(2))
    other = ring(tmp_path).authenticate(BOB, "").salt
    assert first == again and first != other and len(first) == 64
    assert ALICE not in first and hashlib.sha256(ALICE.encode()).hexdigest() != first
    text = entry("alice", ALICE, 'salt = "team"') + entry("bob", BOB, 'salt = "team"')
    shared = KeyRing.open(written(tmp_path, text))
    assert shared.authenticate(ALICE, "").salt == shared.authenticate(BOB, "").salt == "team"


def test_every_key_is_compared_wherever_the_right_one_stands(tmp_path, monkeypatch):
    keys, compared = ring(tmp_path), []

    real = hmac.compare_digest
    monkeypatch.setattr(keys_module.hmac, "compare_digest", lambda a, b: compared.append(a) or real(a, b))
    keys.authenticate(ALICE, "")
    assert len(compared) == 2


def test_without_a_file_everybody_comes_in_and_shares_limits():
    keys = KeyRing.anonymous(KeyLimits(requests_per_minute=5))
    for token in (None, "whatever"):
        caller = keys.authenticate(token, "peer")
        assert (caller.key_id, caller.salt, caller.peer) == ("", "", "peer")
    assert keys.limits_of("").requests_per_minute == 5 and keys.ids == () and keys.reloaded() == 0


def test_a_key_taken_away_is_nobody_after_a_reload_and_a_mistake_changes_nothing(tmp_path):
    keys = ring(tmp_path)
    written(tmp_path, entry("alice", ALICE, "tokens_per_minute = 9"))
    assert keys.reloaded() == 1 and keys.limits_of("alice").tokens_per_minute == 9
    assert keys.caller("alice") == keys.authenticate(ALICE, "")
    for refused in (
        lambda: keys.authenticate(BOB, ""),
        lambda: keys.limits_of("bob"),
        lambda: keys.caller("bob"),
        lambda: keys.caller(""),
        lambda: KeyRing.anonymous().caller("alice"),
    ):
        with pytest.raises(ServiceError) as told:
            refused()
        assert told.value.kind is Kind.UNAUTHENTICATED
    written(tmp_path, "nonsense\n")
    with pytest.raises(ConfigError, match="line 1"):
        keys.reloaded()
    assert keys.authenticate(ALICE, "").key_id == "alice"


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "no [[keys]]"),
        ("keys = 3", "no [[keys]]"),
        ("keys = [3]", "no [[keys]]"),
        ('secret = "sesame-sesame-sesame"', "beside [[keys]]"),
        (f'[[keys]]\nid = "a"\ntoken = "{ALICE}', "end of document"),
        (f'[[keys]]\nid = "a"\ntoken = {ALICE}', "line 3"),
        ('[[keys]]\nid = "a"', "neither of token and token_sha256"),
        (entry("a", ALICE, f'token_sha256 = "{"0" * 64}"'), "both of token and token_sha256"),
        ('[[keys]]\nid = "a"\ntoken_sha256 = "sesame"', "64 hexadecimal digits"),
        (entry("a", "sesame"), "token has 6 characters"),
        (entry("a", "sesame sesame sesame"), "printable ASCII"),
        ('[[keys]]\nid = "a"\ntoken = 3', "printable ASCII"),
        (entry("", ALICE), "number 1: id"),
        (entry("a b", ALICE), "number 1: id"),
        ('[[keys]]\ntoken = "sesame-sesame-sesame"', "number 1: id"),
        (entry("a", ALICE, "request_per_minute = 3"), "did you mean requests_per_minute"),
        (entry("a", ALICE, '"sesame-sesame-sesame" = 3'), "known are id, token"),
        (entry("a", ALICE, 'requests_per_minute = "sesame"'), "requests_per_minute is not an integer"),
        (entry("a", ALICE, "max_concurrent = -1"), "max_concurrent is not an integer"),
        (entry("a", ALICE, "max_concurrent = true"), "max_concurrent is not an integer"),
        (entry("a", ALICE, 'salt = ""'), "salt"),
        (entry("a", ALICE) + entry("a", BOB), "id of [[keys]] number 2 is that of number 1"),
        (entry("a", ALICE) + entry("b", ALICE), "token of [[keys]] number 2 is that of number 1"),
    ],
)
def test_a_mistake_names_its_place_and_shows_no_token(text, words, tmp_path):
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as told:
        KeyRing.open(path)
    message = str(told.value)
    assert words in message and "keys.toml" in message
    assert ALICE not in message and "sesame" not in message


def test_a_file_that_cannot_be_read_is_told(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        KeyRing.open(tmp_path / "none.toml")
    (tmp_path / "keys.toml").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="UTF-8"):
        KeyRing.open(tmp_path / "keys.toml")


@pytest.mark.parametrize("mode, told", [(0o644, True), (0o600, False), (0o640, False)])
def test_a_file_that_everybody_can_read_is_warned_of(mode, told, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        KeyRing.open(written(tmp_path, entry("alice", ALICE), mode))
    assert ("chmod 600" in caplog.text) is told and ALICE not in caplog.text


def test_no_repr_shows_a_secret(tmp_path):
    keys = ring(tmp_path)
    shown = repr(vars(keys))
    assert "alice" in shown
    assert ALICE not in shown and keys.authenticate(ALICE, "").salt not in shown
    assert repr(hashlib.sha256(ALICE.encode()).digest()) not in shown


def test_limits_are_counts():
    for wrong in (-1, 1.5, True, "3"):
        with pytest.raises(ConfigError, match="max_concurrent"):
            KeyLimits(max_concurrent=wrong)
