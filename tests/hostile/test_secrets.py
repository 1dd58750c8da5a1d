"""A secret reaches no file of a run: not its folder, its snapshot, its job's script, nor a message or an upload."""

from __future__ import annotations

import copy
import json
import re
import string
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import MagicMock

import pytest
from quantexp_launchers.slurm.batch import Batch
from quantexp_launchers.slurm.script import run_script

from quantexp.config.compose import compose
from quantexp.config.load import plain, save
from quantexp.errors import ConfigError, QuantexpError
from quantexp.launch.attempt import open_run
from quantexp.runs import snapshot
from quantexp.runs.metrics import Metrics
from quantexp.runs.paths import RunDir
from quantexp.runs.provenance import Source
from quantexp.runs.redaction import is_secret_name, redacted, refuse_secrets, secrets
from quantexp.runs.status import State
from quantexp.schema import Experiment
from quantexp.training.tracking.clients import Tracking
from quantexp.training.tracking.upload import error_line
from quantexp.training.worker import Worker

Tiny = Callable[..., Experiment]

ALNUM = string.ascii_letters + string.digits
HEX = string.hexdigits[:16]
NAMES = [
    *("HF_TOKEN", "HFTOKEN", "GITHUBTOKEN", "CLIENTSECRET", "APITOKEN", "DB_PWD", "AUTH_BEARER"),
    *("SESSION_COOKIE", "SLACK_WEBHOOK_URL", "SENTRY_DSN", "WANDB_API_KEY", "clientSecret"),
    *("PGPASSWORD", "SMTPPASS", "AWS_SECRET_ACCESS_KEY", "MY_API_KEYS", "BASIC_AUTH", "hfToken"),
    *("HF_TOKEN_2", "OPENAI_APIKEY", "GPG_PASSPHRASE", "GOOGLE_CREDENTIALS", "SLURM_JWT"),
]


def text(random: Random, alphabet: str, length: int) -> str:
    """Random characters, the first three of unlike classes where the alphabet has them."""
    start = "aB3" if alphabet == ALNUM else ""
    return start + "".join(random.choices(alphabet, k=length - len(start)))


#: Words -> a secret, which only the name of its variable gives away.
KINDS: dict[str, Callable[[Random], str]] = {
    "wandb": lambda r: text(r, HEX, 40),
    "aws secret": lambda r: text(r, ALNUM, 40),
    "password": lambda r: f"correct-horse-{text(r, string.digits, 4)}",
}


def secret(random: Random) -> str:
    return KINDS[random.choice(list(KINDS))](random)


def in_yaml(value: str) -> str:
    """A value as Hydra's grammar takes it whole."""
    return json.dumps(value)


#: An override that plants a named secret.
OVERRIDES: list[Callable[[str, str], str]] = [
    lambda name, value: f"+launcher.environment.{name}={in_yaml(value)}",
    lambda name, value: f"+launcher.environment={{{name}: {in_yaml(value)}}}",
    lambda name, value: f"launcher.setup=[{in_yaml(f'export {name.upper()}={value}')}]",
    lambda name, value: f"launcher.srun_args=[{in_yaml(f'--export={name.upper()}={value}')}]",
]


def test_configuration_with_a_secret_is_refused_with_the_way_that_works(
    cases: Iterator[Random],
) -> None:
    for random in cases:
        name, value = random.choice(NAMES), secret(random)
        override = random.choice(OVERRIDES)(name, value)
        words = ["training=fast", "launcher=slurm", override]
        with pytest.raises(ConfigError) as caught:
            compose(words, None, {})
        message = str(caught.value)
        assert "must hold no secret, got " in message
        assert "Export the variable in the shell that submits" in message
        assert value not in message


def test_value_of_a_variable_is_refused_under_any_key(cases: Iterator[Random]) -> None:
    clean = asdict(compose(["training=fast", "launcher=slurm"], None, {}))
    refuse_secrets(clean, {})
    keys = list(text_keys(clean))
    assert len(keys) > 30
    for random in cases:
        content, key = copy.deepcopy(clean), random.choice(keys)
        value = secret(random)
        *path, last = key.split(".")
        node = content
        for name in path:
            node = node[name]
        node[last] = random.choice([value, f"/data/{value}/x", f"a={value}", [value]])
        with pytest.raises(
            ConfigError, match=rf"^{re.escape(key)}(\[0\])? must hold no secret, got"
        ) as caught:
            refuse_secrets(content, {random.choice(NAMES): value})
        assert value not in str(caught.value)


def text_keys(content: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """The keys whose values are texts or null."""
    for name, value in content.items():
        if isinstance(value, dict):
            yield from text_keys(value, f"{prefix}{name}.")
        elif value is None or type(value) is str:
            yield f"{prefix}{name}"


def test_no_byte_of_a_prepared_and_failed_run_holds_a_secret(
    tiny: Tiny, cases: Iterator[Random], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Secrets are planted in the environment, the command line, uncommitted changes and the error of a rank."""
    fail: list[str] = []
    experiment = tiny()

    def train(worker: Worker) -> None:
        raise random.choice([RuntimeError, QuantexpError, OSError])(fail[0])

    monkeypatch.setattr(Worker, "_train", train)
    monkeypatch.setattr(snapshot, "take_snapshot", lambda root: tmp_path / "snapshot")
    monkeypatch.setattr("quantexp.launch.attempt.take_snapshot", lambda root: tmp_path / "snapshot")
    for number, random in enumerate(cases):
        variable, of_variable = random.choice(NAMES), secret(random)
        name, named = random.choice(NAMES).upper(), secret(random)
        planted = [of_variable, named]
        command = ["quantexp", f"--config-dir=/x/{of_variable}", f"{name}={named}"]
        diff = f'--- a/x\n+++ b/x\n+{name} = "{named}"\n+y("{of_variable}")\n'
        fail[:] = [f"401 for {of_variable} and https://me:{KINDS['wandb'](random)}@host"]
        with monkeypatch.context() as patch:
            patch.setenv(variable, of_variable)
            experiment.training.seed = number
            source: Source = {"commit": "0" * 40, "diff": diff}
            with open_run(experiment, "cpu", command, source=source) as (folder, _):
                assert Worker(folder.run, experiment).run() == 1
            upload = error_line(RuntimeError(f"{fail[0]} {name}={named}"))
        for place, content in [*contents(folder.run.root), ("an upload", upload)]:
            for value in planted:
                assert value not in content, (place, value)


@pytest.mark.parametrize("tracker", ["wandb", "mlflow"])
def test_no_request_to_a_tracker_holds_a_secret(
    tiny: Tiny,
    cases: Iterator[Random],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    tracker: str,
) -> None:
    """Every call of the tracker's library, for a run that ended with an error full of secrets."""
    run = RunDir(tmp_path / "runs" / "tiny_data_bf16-0a1b2c3d")
    run.logs.mkdir(parents=True)
    experiment = tiny(f"tracking.{tracker}.enabled=true")
    save(experiment, run.config)
    for random in cases:
        variable, of_variable = random.choice(NAMES), secret(random)
        reason = f"401 for {of_variable} at https://me:{KINDS['wandb'](random)}@host"
        library = MagicMock()
        library.init.return_value.configure_mock(offline=False, url="http://w")
        with monkeypatch.context() as patch:
            patch.setenv(variable, of_variable)
            for name in ("", ".tracking", ".entities", ".exceptions"):
                patch.setitem(sys.modules, f"{tracker}{name}", library)
            tracking = Tracking(run, experiment)
            tracking.start("2026-01-02T03:04:05+00:00")
            tracking.end(State.FAILED, reason)
            assert tracking.report()[tracker]["ended"]
        requests = str(library.mock_calls)
        assert "401 for <" in requests
        for value in (of_variable, reason.split("me:")[1].split("@")[0]):
            assert value not in requests


def contents(root: Path) -> Iterator[tuple[str, str]]:
    for file in root.rglob("*"):
        yield "the name of a file", str(file)
        if file.is_file():
            yield str(file), file.read_bytes().decode(errors="replace").replace("\\n", "\n")


def test_snapshot_leaves_out_what_may_hold_secrets(
    cases: Iterator[Random], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without git, as of an installed package."""
    names = [
        *(".env", ".env.local", "prod.env", "id_rsa", "id_ed25519.pub", "server.pem", "tls.KEY"),
        *("cert.p12", "credentials", "credentials.json", ".netrc", ".npmrc", ".aws/config"),
        *(
            ".ssh/known_hosts",
            "kubeconfig",
            ".kube/config.yaml",
            ".git-credentials",
            "secrets.yaml",
        ),
    ]
    for number, random in enumerate(cases):
        package = tmp_path / str(number) / "quantexp"
        planted = secret(random)
        folder = package / random.choice([".", "data", "data/deep"])
        bad = folder / random.choice(names)
        good = package / random.choice(
            ["tokenizer.py", "keys.py", "credentials.py", "env.py", "tokens.yaml"]
        )
        for file, content in ((bad, planted), (good, "pass")):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)
        (package / "conf").mkdir()
        monkeypatch.setattr(snapshot, "_folder_of", lambda name, package=package: package)
        snapshot.take_snapshot.cache_clear()
        copied = snapshot.take_snapshot(tmp_path / str(number) / "runs")
        snapshot.check_snapshot(copied)
        assert (copied / "quantexp" / good.name).is_file()
        assert not any(bad.name == file.name for file in copied.rglob("*"))
        assert all(planted not in content for _, content in contents(copied))
    snapshot.take_snapshot.cache_clear()


def test_script_of_a_job_holds_no_secret_of_the_environment(
    cases: Iterator[Random], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = compose(["training=fast", "launcher=slurm"], None, {})
    for random in cases:
        name, value = random.choice(NAMES), secret(random)
        monkeypatch.setenv(name, value)
        batch = Batch(
            tmp_path / "q", "q", (tmp_path / "run",), experiment.launcher, tmp_path / "snapshot"
        )
        assert value not in run_script(batch)
        monkeypatch.delenv(name)


#: Variables of torch, SLURM, NCCL and a shell, whose values appear in commands and configurations.
HARMLESS = [
    *("SLURM_JOB_ACCOUNT", "SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_JOB_NODELIST", "SLURM_NTASKS"),
    *("SLURM_SUBMIT_DIR", "SLURM_CLUSTER_NAME", "SLURM_JOB_PARTITION", "SLURM_TASKS_PER_NODE"),
    *("SLURM_CPUS_PER_TASK", "SLURM_TOPOLOGY_ADDR_PATTERN", "SLURM_CONF", "SLURM_JOB_USER"),
    *("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"),
    *(
        "NCCL_SOCKET_IFNAME",
        "NCCL_IB_HCA",
        "NCCL_DEBUG",
        "NCCL_IB_PKEY_INDEX",
        "GLOO_SOCKET_IFNAME",
    ),
    *(
        "CUDA_VISIBLE_DEVICES",
        "CUBLAS_WORKSPACE_CONFIG",
        "PYTORCH_CUDA_ALLOC_CONF",
        "OMP_NUM_THREADS",
    ),
    *("TOKENIZERS_PARALLELISM", "HF_HOME", "HF_HUB_OFFLINE", "WANDB_PROJECT", "WANDB_ENTITY"),
    *(
        "TRITON_CACHE_DIR",
        "PWD",
        "OLDPWD",
        "HOME",
        "SSH_AUTH_SOCK",
        "XAUTHORITY",
        "LOGNAME",
        "PATH",
    ),
    *("AWS_WEB_IDENTITY_TOKEN_FILE", "GOOGLE_APPLICATION_CREDENTIALS_FILE", "KRB5CCNAME", "TMPDIR"),
    *("MAX_TOKENS", "TOKENS_PER_S", "COMPASS", "BYPASS", "MONKEY_PATCH", "DISPLAY", "AUTHOR"),
]
HARMLESS_TEXTS = [
    "model.num_query_groups=8 quant.qk.key_value_axis=head_dim tokens_per_s=12345678",
    "/data/sk-experiments-2024/hf_checkpoint_llama31/tokenizer.model",
    "paths.root=/scratch/sk-learn-runs-of-the-second-year/run_000000000000000000001",
    "hf_transfer ghp xoxb AKIA eyJ sk-10 AIza",
    "commit 0123456789abcdef0123456789abcdef01234567",
    "key = self.keys_by_layer_2 + token.position(17)",
    "token: str = field(default=TOKENIZER_NAME_8)",
    "for secret_layer in layers: secret_layer.weight_31.requires_grad_(False)",
    "s3://bucket/path@version git@github.com:someone/repo.git someone@example.com",
    "registry.example.com/team/image:v1.2.3@sha256:" + "0a" * 32,
]


def test_nothing_of_an_experiment_is_taken_for_a_secret(cases: Iterator[Random]) -> None:
    """Every key and value of every shipped choice stays as it is, and so do the variables of torch and SLURM."""
    for name in HARMLESS:
        assert not is_secret_name(name), name
        assert secrets({name: "some-long-value-8"}) == {}
    for text_ in HARMLESS_TEXTS:
        assert redacted(text_, {}) == text_
        refuse_secrets({"x": text_}, {})
    for random in cases:
        folder = "/".join(
            text(random, string.ascii_lowercase + "_-0123456789", 12) for _ in range(4)
        )
        words = f"paths.root=/{folder} training.lr={random.random()} dataset.path=/{folder}.bin"
        assert redacted(words, {}) == words
        refuse_secrets({"x": f"/{folder}"}, {})


def test_no_key_of_the_schema_and_no_shipped_choice_is_taken_for_a_secret() -> None:
    for launcher in ("local", "slurm"):
        for quant in ("FA_linear_mxfp8", "bf16", "more/linear_mxfp4_sr_rht"):
            experiment = compose(
                ["training=fast", f"launcher={launcher}", f"quant={quant}"], None, {}
            )
            content = plain(experiment)
            assert not [key for key in all_keys(content) if is_secret_name(key)]
            assert redacted(content, {}) == content
    assert not [f.name for f in fields(Metrics) if is_secret_name(f.name)]


def all_keys(content: Any) -> Iterator[str]:
    if isinstance(content, dict):
        for key, value in content.items():
            yield key
            yield from all_keys(value)
    elif isinstance(content, list):
        for value in content:
            yield from all_keys(value)
