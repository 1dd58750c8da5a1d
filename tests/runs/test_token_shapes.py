"""Secrets that a text itself reveals, and values that only look like one."""

from __future__ import annotations

import time

import pytest

from quantexp.runs.token_shapes import is_secret_name, secrets_by_shape


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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x hf_abcdefghijklmnopqrstuvwxyzABCDEFGH y", "Hugging Face token"),
        ('MY_PASSWORD="correct horse"', None),
        ('MY_PASSWORD="correct-horse"', "value of MY_PASSWORD"),
        ("export DB_PWD=hunter22", "value of DB_PWD"),
        ("export HF_TOKEN=$(cat ~/.hf)", None),
        ("HF_TOKEN=$HF_TOKEN python", None),
        ("token = read_token_of(path)", None),
        ("wandb_api_key: 0123456789abcdef0123456789abcdef01234567", "value of wandb_api_key"),
        ("Authorization: Bearer abcdefgh12345678ABCD", "value of Authorization"),
        ("commit: 0123456789abcdef0123456789abcdef01234567", None),
        ("SSH_PRIVATE_KEY=/home/me/.ssh/id_1234", None),
    ],
)
def test_value_is_a_secret_by_its_shape_or_the_name_before_it(
    text: str, expected: str | None
) -> None:
    assert next((words for words, _ in secrets_by_shape(text)), None) == expected


@pytest.mark.parametrize(
    "piece",
    ["a", "-eyJ", "eyJaaaaaaaaa.", "a=", "sk-", "key ", '"', "key=", "-----BEGIN ", "a.", "A_"],
)
def test_time_of_a_search_grows_with_the_text_alone(piece: str) -> None:
    """A text of 64 KiB in every repetition takes at most 40 times one of 8 KiB; the square would be 64 times."""

    def seconds(size: int) -> float:
        text = piece * (size // len(piece))
        start = time.process_time()
        list(secrets_by_shape(text))
        return time.process_time() - start

    short = min(seconds(1 << 13) for _ in range(3))
    assert min(seconds(1 << 16) for _ in range(3)) < max(0.05, 40 * short)
