"""What leaves the house has no secrets in it: many spellings, and what must stay readable."""

import json

import pytest

from hpc_ckpt.chain.redact import MARK, redact, secrecy

HEX = "0123456789abcdef0123456789abcdef01234567"
"""As long as a key of Weights & Biases."""


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        (f"WANDB_API_KEY={HEX}", HEX),
        ("export HF_TOKEN=abc123", "abc123"),
        ("export HF_TOKEN='abc 123'", "abc 123"),
        ('HF_TOKEN="abc 123" python train.py', "abc 123"),
        ("env A=1 DB_PASSWORD=hunter2 B=2", "hunter2"),
        ("DB_PASSWORD=1234", "1234"),
        ("MYSQL_PWD=hunter2", "hunter2"),
        ("db_pass: hunter2", "hunter2"),
        ("password: p@ss,w(o)rd;x", "p@ss,w(o)rd;x"),
        ("password : hunter2", "hunter2"),
        ("Password=hunter2", "hunter2"),
        ("  secret: 'two words'", "two words"),
        ("clientSecret: hunter2", "hunter2"),
        ("AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI", "wJalrXUtnFEMI"),
        ('"api_key": "abc123"', "abc123"),
        ('{"token":"abc123","step":3}', "abc123"),
        ('{"token": "with \\" quote"}', "with"),
        ('{"password": 1234}', "1234"),
        ("{'token': 'abc123'}", "abc123"),
        ("tokens: [abc123, def456]", "def456"),
        ('"command": "WANDB_API_KEY=abc123 python train.py"', "abc123"),
        ('"command": "run --api-key abc123 x"', "abc123"),
        ('"env": "{\\"token\\": \\"abc123\\"}"', "abc123"),
        ("train.py --api-key abc123", "abc123"),
        ("train.py --api-key=abc123", "abc123"),
        ("train.py --api_key 'abc 123'", "abc 123"),
        ("train.py --lr 0.1 --verbose --password hunter2", "hunter2"),
        ('["train.py", "--token", "abc123"]', "abc123"),
        ('[\n  "train.py",\n  "--token",\n  "abc123"\n]', "abc123"),
        ("docker run -e GITHUB_TOKEN=abc123 x", "abc123"),
        ("setenv GITHUB_TOKEN abc123", "abc123"),
        ("url=https://example.org/?token=abc123&x=1", "abc123"),
        ("https://user:hunter2@example.org/x.git", "hunter2"),
        ("https://abc123token@example.org/x.git", "abc123token"),
        ("postgresql://me:p@ss@db:5432/x", "p@ss"),
        ("Authorization: Bearer abc123def", "abc123def"),
        ('"Authorization": "Basic dXNlcjpwYXNz"', "dXNlcjpwYXNz"),
        ("-H 'X-Api-Key: abc123'", "abc123"),
        ("Cookie: session=abc123; other=def456", "def456"),
        ("curl with bearer abc123def456", "abc123def456"),
        ("key was ghp_0123456789abcdefABCDEF0123456789abcd there", "ghp_"),
        ("github_pat_11AAAAAAA0abcdefghij_KLMNOP", "github_pat_"),
        ("sk-proj-abcdefghijklmnop1234", "sk-proj"),
        ("hf_abcdefghijklmnopqrstuvwxyzABCDEFGH", "hf_abc"),
        ("AKIAIOSFODNN7EXAMPLE", "AKIAIOSF"),
        ("xoxb-123456789012-abcdefghijkl", "xoxb"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl", "eyJhbGci"),
        (f"logged in with {HEX}", HEX),
        (f"logged in with {HEX.upper()}", HEX.upper()),
        ("value Zm9vYmFyMTIzNDU2Nzg5MGFiY2RlZmdoaWprbG1ub3A= here", "Zm9vYmFy"),
        ("aB3dE6gH9jK2mN5pQ8sT1vW4yZ7", "aB3dE6gH"),
        ("k3j5h2g8d9s7f6a4p1o2i3u4y5t6r7e8", "k3j5h2g8"),
        ("-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXk\n-----END OPENSSH PRIVATE KEY-----",
         "b3BlbnNzaC1rZXk"),
        ("-----BEGIN RSA PRIVATE KEY-----\\nMIIEow\\n-----END RSA PRIVATE KEY-----", "MIIEow"),
        ("-----BEGIN PRIVATE KEY-----\nMIIEowcut off here", "MIIEowcut"),
        ("sshpass -p hunter2 ssh x", "hunter2"),
        ("sshpass -phunter2 ssh x", "hunter2"),
        ('["sshpass", "-v", "-p", "hunter2", "ssh"]', "hunter2"),
        ('"sshpass",\n  "-p",\n  "hunter2"', "hunter2"),
        ("curl -u bob:hunter2 https://x", "hunter2"),
        ("curl -s --user bob:hunter2 https://x", "hunter2"),
        ("curl --user=bob:hunter2", "hunter2"),
        ("curl -u 'bob:hunter 2' x", "hunter 2"),
        ('"curl", "-u", "bob:hunter2"', "hunter2"),
        ("machine github.com login bob password hunter", "hunter"),
        ("login bob\npassword hunter", "hunter"),
        ("the password is hunter2", "hunter2"),
        ("WANDB_API_KEY is hunter2", "hunter2"),
        ("MYPASS=hunter2", "hunter2"),
        ("PGPASS=hunter2", "hunter2"),
        ("userpass=bob:hunter2", "hunter2"),
        ("creds=bob:hunter2", "hunter2"),
        ("passcode=hunter2", "hunter2"),
        ("db_pswd=hunter2", "hunter2"),
        ("SLURM_JWT=abcdef", "abcdef"),
        ("API_KEY=\\\n hunter2", "hunter2"),
        ("mysql -phunter2 -u root", "hunter2"),
        ("mysql -u root -p hunter2 db", "hunter2"),
        ("mysqldump --port 3306 -phunter2", "hunter2"),
        ("redis-cli -h x -a hunter2 ping", "hunter2"),
        ("ldapsearch -x -w hunter2 -b dc=x", "hunter2"),
        ("https://hooks.slack.com/services/T00000000/B00000000/abcdefghijklmnop", "abcdefgh"),
        ("url: https://discord.com/api/webhooks/123456/abcdefghijklmnopqrst", "abcdefgh"),
        ("https://discordapp.com/api/v10/webhooks/123456/abcdefghijklmnopqrst", "abcdefgh"),
        ("https://x.webhook.office.com/webhookb2/abc@def/IncomingWebhook/ghi", "ghi"),
        ("telegram 123456789:AAF-abcDEFghiJKLmnoPQRstuVWXyz12345", "AAF-abc"),
        ("https://api.telegram.org/bot123456789:AAF-abcDEF/send", "AAF-abc"),
        ("secret: |\n  hunter2\n  line2\nnext: 1", "line2"),
        ("  - password: >-\n\n      hunter2\n\n      line2", "line2"),
        ("passwords:\n  - hunter2\n  - line2\nnext: 1", "line2"),
        ("token: 1234567890", "1234567890"),
        ("dict(token=12345678)", "12345678"),
    ],
)  # fmt: skip
def test_secrets_go(text: str, secret: str) -> None:
    """In every spelling; the mark takes their place, and the place is told."""
    assert secret in text
    clean, places = redact(text, "f")
    assert secret not in clean
    assert MARK in clean
    assert places
    assert not any(secret in str(place) for place in places)


@pytest.mark.parametrize(
    "text",
    [
        "PWD=/home/me/project",
        "max_tokens=4096 tokens/s: 1234.5 num_tokens: 1e9",
        '{"key": 3, "token": null}',
        "AuthType = auth/munge",
        "JobCredentialPrivateKey = (null)",
        "HF_TOKEN=$HF_TOKEN",
        "HF_TOKEN=${SECRET_FROM_FILE}",
        "monkey: banana, keyboard: de, tokenizer: fast",
        "KeyError: 'layer1.weight'",
        "3 tests passed, passes: 2",
        "checkpoints/step-000012000-g00000007/rank-00000.safetensors",
        "/home/me/projects/a-long-directory-name/with/many/parts/train_with_checkpoints.py",
        "this_is_a_very_long_identifier_without_any_meaning_at_all = 3",
        "lr-0.1_seed-1_batch-32_width-64_depth-4_dropout-1",
        '"chain": "3f2b8c1e-7d4a-4b6f-9c0d-1e2f3a4b5c6d"',
        f'"git": "{HEX}"',
        f"commit {HEX}",
        "#SBATCH --output=/scratch/me/runs/resnet/logs/slurm-%A_%a.log",
        "SLURM_JOB_CPUS_PER_NODE=8 OMP_NUM_THREADS=8",
        "2026-11-16T12:34:56 step 400 loss 0.123456789012345678901234567890",
        "url: https://example.org/docs?page=3",
        "git@example.org:group/project.git",
        "docker run -u 1000:1000 image",
        "sshpass -p $PW ssh x; mysql -p${PW} db",
        "missing state_key conv1.weight",
        "git push -u https://example.org/x.git main",
        "num_tokens: 1234567890 key: 31415",
        "bypass: 3 compass=north lowpass: 0.5",
        "password authentication failed; the token was refused",
        "mysql -u root -h db -P 3306",
        "notes: |\n  two\n  lines\nlayers:\n  - conv1\n  - conv2",
        "pin: {code: commit}",
        "python -u train.py --lr 0.1",
        "https://hooks.example.org/docs",
        "   1  local     0 → 94  time limit         6.5 s   0.019 s         0     22 %",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    """A report in which everything is black helps nobody."""
    assert (text, []) == redact(text, "f")


def test_json_stays_json() -> None:
    """Machines read the records of a report too."""
    record = {
        "argv": ["python", "--token", "abc", "--lr", "0.1"],
        "environment": {"WANDB_API_KEY": "abc", "PASSWORD": 12, "LIST_KEYS": ["a", "b"]},
        "command": 'TOKEN="a b" python x.py --password "c d"',
        "url": "https://me:pw@host/",
    }
    for indent in (None, 1):
        clean, _ = redact(json.dumps(record, indent=indent), "f")
        read = json.loads(clean)
        assert [MARK, "--lr", "0.1"] == read["argv"][2:]
        assert {MARK} == {read["environment"][k] for k in ("WANDB_API_KEY", "PASSWORD")}
        assert "a b" not in read["command"]
        assert f"https://{MARK}@host/" == read["url"]


def test_places_have_lines_and_names_but_no_values() -> None:
    """So that the owner can look each of them up."""
    key = "-----BEGIN PRIVATE KEY-----\nQQ\nWW\n-----END PRIVATE KEY-----\n"
    text = f"a\nHF_TOKEN=x1\nb\n{key}PASSWORD=y\n"
    clean, places = redact(text, "logs/x.log")
    assert [
        "logs/x.log:2: value of HF_TOKEN",
        "logs/x.log:4: a private key",
        "logs/x.log:8: value of PASSWORD",
    ] == [str(place) for place in places]
    assert text.count("\n") == clean.count("\n")


def test_clean_text_is_not_cleaned_again() -> None:
    """A report of a report says the same."""
    once, _ = redact(f"HF_TOKEN=abc {HEX} https://a:b@c/ Authorization: Bearer abcdefgh", "f")
    assert (once, []) == redact(once, "f")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("WANDB_API_KEY", "mostly"), ("apiKey", "always"), ("APIKEY", "always"),
        ("GITHUB_TOKEN", "mostly"), ("dbPassword", "always"), ("PGPASSWORD", "always"),
        ("PWD", None), ("OLDPWD", None), ("DB_PWD", "always"), ("TOKENIZERS_PARALLELISM", None),
        ("keep", None), ("PATH", None), ("MONKEY", None), ("compass", None),
    ],
)  # fmt: skip
def test_names_of_secrets(name: str, expected: str | None) -> None:
    """By their parts, however they are joined."""
    assert expected == secrecy(name)


def test_a_long_text_without_end_is_read_in_time() -> None:
    """Progress bars make lines of megabytes."""
    text = "a=b " * 20_000 + "x" * 200_000 + "=" * 1000 + "https://" + "y" * 50_000
    clean, _ = redact(text, "f")
    assert len(clean) >= len(text) - 300_000


def test_a_block_keeps_its_lines_and_what_follows() -> None:
    """Line numbers of the list stay true."""
    text = "a: 1\nsecret: |\n  hunter2\n\n  line2\nb: 2\n"
    clean, places = redact(text, "f")
    assert "a: 1\nsecret: |\n  [redacted]\n\n\nb: 2\n" == clean
    assert ["f:3: value of secret"] == [str(place) for place in places]
