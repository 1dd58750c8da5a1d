"""Secrets by the names of variables and keys, wherever their values occur."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from quantexp.config.compose import compose
from quantexp.errors import ConfigError
from quantexp.runs.redaction import (
    is_secret_name,
    redacted,
    refuse_secrets,
    secret_in,
    secrets,
    without_userinfo,
)

VALUE = "aLongSecretValue"


@pytest.mark.parametrize(
    "name",
    [
        "WANDB_API_KEY",
        "HF_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_ACCESS_KEY_ID",
        "AWS_SESSION_TOKEN",
        "MLFLOW_TRACKING_PASSWORD",
        "MLFLOW_TRACKING_TOKEN",
        "OPENAI_API_KEY",
        "GITHUB_PAT",
        "SLURM_JWT",
        "PGPASSWORD",
        "my_secret",
        "TOKEN",
    ],
)
def test_variable_with_the_name_of_a_secret_is_one(name: str) -> None:
    assert secrets({name: VALUE, "HOME": "/home/someone"}) == {name: VALUE}
    assert secret_in(f"before {VALUE} after", {name: VALUE}) == name


@pytest.mark.parametrize(
    "name",
    [
        "PATH",
        "HOME",
        "TOKENIZERS_PARALLELISM",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "GOOGLE_APPLICATION_CREDENTIALS_PATH",
        "SSH_AUTH_SOCK",
        "KEYBOARD_LAYOUT",
        "COMPASS",
        "MONKEYPATCH",
    ],
)
def test_other_variables_hold_none(name: str) -> None:
    assert secrets({name: VALUE}) == {}


@pytest.mark.parametrize(
    "name",
    [
        *("HFTOKEN", "GITHUBTOKEN", "CLIENTSECRET", "APITOKEN", "DB_PWD", "AUTH_BEARER"),
        *("SESSION_COOKIE", "SLACK_WEBHOOK_URL", "SENTRY_DSN", "apiKey", "hf-token", "HF_TOKEN_2"),
        *("AWS_ACCESS_KEY_ID", "REGISTRY_AUTH", "SMTPPASS", "API_KEYS", "PRIVATE_KEY_PEM"),
    ],
)
def test_name_of_a_secret_is_recognised_however_it_is_spelled(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        *("PWD", "OLDPWD", "MAX_TOKENS", "tokens_per_s", "tokenizer", "key_value", "COMPASS"),
        *(
            "NCCL_IB_PKEY_INDEX",
            "AUTH_METHOD",
            "MONKEY",
            "AUTHOR",
            "SSH_AUTH_SOCK",
            "HF_TOKEN_PATH",
        ),
    ],
)
def test_other_names_hold_no_secret(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.parametrize("value", ["", "true", "none", "7 chars"])
def test_common_word_is_no_secret(value: str) -> None:
    assert secrets({"MY_TOKEN": value}) == {}


def test_secret_is_replaced_by_its_name_in_all_json() -> None:
    environment = {"HF_TOKEN": VALUE, "MY_KEY": f"{VALUE}AndMore"}
    content: dict[str, Any] = {
        "command": ["quantexp", f"a={VALUE}"],
        VALUE: {"diff": f"+key = '{VALUE}AndMore'"},
        "number": 3,
        "nothing": None,
    }
    expected = {
        "command": ["quantexp", "a=<HF_TOKEN>"],
        "<HF_TOKEN>": {"diff": "+key = '<MY_KEY>'"},
        "number": 3,
        "nothing": None,
    }
    assert redacted(content, environment) == expected
    assert VALUE not in json.dumps(redacted(content, environment))


@pytest.mark.parametrize(
    ("text", "without"),
    [
        ("https://me:password@host/path", "https://host/path"),
        ("postgresql+psycopg://me:pass%40word@host:5432/db", "postgresql+psycopg://host:5432/db"),
        ("failed: https://token@host and http://a:b@c", "failed: https://host and http://c"),
        ("https://host/path@version", "https://host/path@version"),
        ("sqlite:////a/b.db", "sqlite:////a/b.db"),
        ("someone@example.com", "someone@example.com"),
    ],
)
def test_address_loses_user_and_password(text: str, without: str) -> None:
    assert without_userinfo(text) == without
    assert redacted(text, {}) == without


def test_configuration_with_a_secret_in_it_is_refused_by_its_key() -> None:
    content = {"training": {"name": "fast"}, "quant": {"rules": [{"modules": [f"x{VALUE}"]}]}}
    refuse_secrets(content, {})
    with pytest.raises(
        ConfigError,
        match=r"quant\.rules\[0\]\.modules\[0\] must hold no secret, got the value of the environment "
        r"variable HF_TOKEN; the configuration is written to the run folder and to the job's script. Export the "
        r"variable in the shell that submits: a local run and sbatch pass it to the job, and programs read it there",
    ) as caught:
        refuse_secrets(content, {"HF_TOKEN": VALUE})
    assert VALUE not in str(caught.value)


def test_override_that_resolves_to_a_secret_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", VALUE)
    with pytest.raises(ConfigError, match=r"paths\.root must hold no secret, got the value of the"):
        compose(["training=fast", "paths.root=runs/${oc.env:HF_TOKEN}"], None, {})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('MY_PASSWORD="correct horse"', None),
        ('MY_PASSWORD="correct-horse"', 'MY_PASSWORD="<MY_PASSWORD>"'),
        ("export DB_PWD=hunter-of-22", "export DB_PWD=<DB_PWD>"),
        ("a.environment.HF_TOKEN=not-a-token", "a.environment.HF_TOKEN=<HF_TOKEN>"),
        ("Authorization: Bearer not-a-token", "Authorization: Bearer <Authorization>"),
        ("export HF_TOKEN=$(cat ~/.hf)", None),
        ("HF_TOKEN=$HF_TOKEN python", None),
        ("token = read_token_of(path)", None),
        ("MAX_TOKENS=1000000000", None),
        ("SSH_PRIVATE_KEY=/keys/id_1234", None),
    ],
)
def test_value_after_the_name_of_a_secret_is_one(text: str, expected: str | None) -> None:
    assert redacted(text, {}) == (expected or text)
    if expected is None:
        refuse_secrets({"a": text}, {})
    else:
        with pytest.raises(
            ConfigError, match=r"^a must hold no secret, got a value under the name"
        ):
            refuse_secrets({"a": text}, {})


@pytest.mark.parametrize("piece", ["A", "A=", "KEY ", '"', "KEY=", "A_", "A.", "TOKEN: "])
def test_time_of_a_search_grows_with_the_text_alone(piece: str) -> None:
    """A text of 64 KiB in every repetition takes at most 40 times one of 8 KiB; the square would be 64 times."""

    def seconds(size: int) -> float:
        text = piece * (size // len(piece))
        start = time.process_time()
        redacted(text, {})
        return time.process_time() - start

    short = min(seconds(1 << 13) for _ in range(3))
    assert min(seconds(1 << 16) for _ in range(3)) < max(0.05, 40 * short)
