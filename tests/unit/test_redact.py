"""What leaves the house has no secrets in it: many spellings, and what must stay readable."""

import json
import time

import pytest

from hpc_ckpt.chain.redact import MARK, redact
from hpc_ckpt.chain.secrecy import secrecy

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
        # as machines write it: without spaces, in another text, cut off
        ('{"a":{"b":1,"token":"hunter2"}}', "hunter2"),
        ('{"user":"bob","password":"hunter2"}', "hunter2"),
        ('{"credentials":{"user":"bob","value":"hunter2"}}', "hunter2"),
        ('{"password":"hunter2', "hunter2"),
        ("password='hunter2", "hunter2"),
        (r'{\"token\":\"hunter2\"}', "hunter2"),
        ('["--token","hunter2","--lr","0.1"]', "hunter2"),
        ("['--token','hunter2']", "hunter2"),
        (r'[\"--token\",\"hunter2\"]', "hunter2"),
        ('["sshpass","-p","hunter2","ssh"]', "hunter2"),
        (r'[\"sshpass\",\"-p\",\"hunter2\",\"ssh\"]', "hunter2"),
        (r'[\"sshpass\", \"-p\", \"hunter2\", \"ssh\"]', "hunter2"),
        ('["curl","-u","bob:hunter2","x"]', "hunter2"),
        (r'{\\\"token\\\":\\\"hunter2\\\"}', "hunter2"),
        ("<password>hunter2</password>", "hunter2"),
        ('<add key="Password" value="hunter2"/>', "hunter2"),
        ("HF_TOKEN=hunter2\0OTHER=1", "hunter2"),
        # the quotes of bash, and words of several pieces
        ("export TOKEN=$'hunter2'", "hunter2"),
        (r"export DB_PASSWORD=$'a\'hunter2'", "hunter2"),
        ('PASSWORD=$"hunter2"', "hunter2"),
        ("password='hun'\"hunter2\"", "hunter2"),
        ('password=ab"hunter2"', "hunter2"),
        (r"password=a\ hunter2", "hunter2"),
        ("TOKEN=`echo hunter2`", "hunter2"),
        ("declare -x HF_TOKEN=\"hunter2\"", "hunter2"),
        # connection strings
        ("Server=db;Uid=bob;Pwd=hunter2;", "hunter2"),
        ("Server=db;User Id=bob;Password=hunter2;Trusted=no", "hunter2"),
        ("host=db user=bob password=hunter2 dbname=x", "hunter2"),
        ("AccountName=a;AccountKey=hunter2==;EndpointSuffix=x", "hunter2"),
        ("redis://:hunter2@cache:6379/0", "hunter2"),
        # names
        ("GITHUB_PAT=hunter2", "hunter2"),
        ("export AZURE_DEVOPS_EXT_PAT=hunter2", "hunter2"),
        ("pass=hunter2", "hunter2"),
        ("WEBHOOK_URL=https://x.example.org/hunter2", "hunter2"),
        ("PRIVATE-TOKEN: hunter2", "hunter2"),
        ("//registry.npmjs.org/:_authToken=hunter2", "hunter2"),
        # code, and other signs between name and value
        ('os.environ["HF_TOKEN"] = "hunter"', "hunter"),
        ('os.putenv("HF_TOKEN", "hunter")', "hunter"),
        ('os.environ.setdefault("WANDB_API_KEY", "hunter")', "hunter"),
        ('if token == "hunter":', "hunter"),
        ("password    =    hunter", "hunter"),
        ("password => hunter", "hunter"),
        ("password := hunter", "hunter"),
        ("set -gx HF_TOKEN hunter", "hunter"),
        ("ENV HF_TOKEN hunter", "hunter"),
        # requests
        ("authorization=Bearer hunter2", "hunter2"),
        ("headers={'Authorization': 'Bearer hunter2'}", "hunter2"),
        ("-H 'Authorization: token hunter2'", "hunter2"),
        # options of one letter
        ("7z x -phunter2 a.7z", "hunter2"),
        ("openssl enc -k hunter2 -in x", "hunter2"),
        ("openssl rsa -passin pass:hunter2", "hunter2"),
        ("ssh-keygen -N hunter2 -f x", "hunter2"),
        ("docker login -u bob -p hunter2 reg", "hunter2"),
        ("smbclient //x/y -U bob%hunter2", "hunter2"),
        ("wget --http-password=hunter2 x", "hunter2"),
        ("curl -ubob:hunter2 x", "hunter2"),
        # files, and what people are told
        ("machine x login bob account y password hunter", "hunter"),
        ("bob:$6$saltsalt$hunter2abcdefghijkl:19000:", "hunter2"),
        ("bob:$2b$12$hunter2abcdefghijklmnopqrstuvwxyz", "hunter2"),
        ("the passphrase for key is hunter2", "hunter2"),
        ("Password for bob: hunter2", "hunter2"),
        # names written as one word
        ("APITOKEN=hunter", "hunter"),
        ("AUTHTOK=hunter", "hunter"),
        ("HF_AUTH_TOK: hunter", "hunter"),
        ("train.py --wandbkey hunter", "hunter"),
        ("WANDBKEY=hunter", "hunter"),
        ("MYTOKEN=hunter", "hunter"),
        ("HFTOKEN=hunter", "hunter"),
        ("HFtoken=hunter", "hunter"),
        ("GITHUBTOKEN=hunter", "hunter"),
        ("sessionkey=hunter", "hunter"),
        ("licensekey: hunter", "hunter"),
        ("MYAPIKEY=1234", "1234"),
        ("APIKEYS=a,hunter", "hunter"),
        ("API_KEY_CACHE=hunter", "hunter"),
        ("NEW_TOKEN=hunter", "hunter"),
        ("key=hunter2", "hunter2"),
        # other operators, brackets, several lines
        ("TOKEN+=hunter", "hunter"),
        ("TOKEN ?= hunter", "hunter"),
        ("TOKEN ::= hunter", "hunter"),
        ('if token != "hunter":', "hunter"),
        ("auth=('me', 'hunter')", "hunter"),
        ("get(url, auth=('me','hunter'), timeout=3)", "hunter"),
        ("auth=(\n  'me',\n  'hunter',\n)", "hunter"),
        ("auth=HTTPBasicAuth('me', 'hunter')", "hunter"),
        ("auth=('me', 'a)hunter')", "hunter"),
        ("api_key=(a hunter)", "hunter"),
        ('api_key+=(a "b c" hunter)', "hunter"),
        ("password=p(w)hunter!", "hunter"),
        ('token="two\nhunter"', "hunter"),
        ("token='two\nhunter'\nnext", "hunter"),
        ('token="""two\nhunter"""', "hunter"),
        ("TOKEN=$(echo hunter)", "hunter"),
        ('TOKEN="$(echo hunter)"', "hunter"),
        ("TOKEN=$(echo $(printf hunter))", "hunter"),
        # programs with forms of their own
        ("aws configure set aws_secret_access_key hunter", "hunter"),
        ("aws --profile x configure set aws_secret_access_key hunter", "hunter"),
        ('["aws","configure","set","aws_secret_access_key","hunter"]', "hunter"),
        ('["aws",\n "configure",\n "set",\n "aws_secret_access_key",\n "hunter"\n]', "hunter"),
        ("rclone config create r s3 access_key_id a secret_access_key hunter region x", "hunter"),
        ("rclone config create r s3 secret_access_key 'a;hunter'", "hunter"),
        ("git config --global github.token hunter", "hunter"),
        ("sqlplus me/hunter@db", "hunter"),
        ("sqlplus -S me/hunter @x.sql", "hunter"),
        ('["sqlplus", "-S", "me/hunter@db"]', "hunter"),
        ("sqlldr userid=me/hunter@db", "hunter"),
        ("jdbc:oracle:thin:me/hunter@host:1521:x", "hunter"),
        ("mysql://me:a/hunter@db", "hunter"),
        ("mysql://me:hunter/a@db", "hunter"),
        ("wandb login hunter", "hunter"),
        ("wandb login --relogin hunter; python x", "hunter"),
        ("wandb login hunter --relogin", "hunter"),
        ("wandb login --host https://x.example.org hunter", "hunter"),
        ('["wandb","login","hunter"]', "hunter"),
        ('"command": "wandb login hunter"', "hunter"),
        ("echo hunter | docker login --password-stdin", "hunter"),
        ("echo 'a|hunter' | docker login -u me --password-stdin reg", "hunter"),
        ("printf '%s' hunter | podman login reg", "hunter"),
        ("docker login --password-stdin <<< hunter", "hunter"),
        ("echo hunter | kinit me", "hunter"),
        ("printf '%s' hunter | /usr/bin/kinit me@REALM", "hunter"),
        ("echo hunter | iinit", "hunter"),
        ("kinit me <<< hunter", "hunter"),
        ("echo hunter | apptainer registry login -u me docker://x", "hunter"),
        ("apptainer registry login -u me -p hunter docker://x", "hunter"),
        ("singularity remote login --username me -p hunter library", "hunter"),
        ("lftp -u me,hunter sftp://x", "hunter"),
        ("lftp -p 22 -u 'me,a hunter' sftp://x", "hunter"),
        ("lftp -e 'open -u me,hunter sftp://x; ls'", "hunter"),
        ('["lftp", "-u", "me,hunter", "sftp://x"]', "hunter"),
        ('["lftp","-u","me,hunter","sftp://x"]', "hunter"),
        ('{"name": "DB_PASSWORD", "value": "hunter"}', "hunter"),
        ('{"name":"DB_PASSWORD","value":"hunter"}', "hunter"),
        ('{"key": "HF_TOKEN",\n "value": "hunter"}', "hunter"),
        (r'{\"name\": \"DB_PASSWORD\", \"value\": \"hunter\"}', "hunter"),
        ("- name: DB_PASSWORD\n  value: hunter\n", "hunter"),
        ("sudo -S ls <<< hunter", "hunter"),
        ("sudo -k -S ls <<<'hunter 2'", "hunter"),
        ("gpg --batch --passphrase-fd 0 -d x.gpg <<< hunter", "hunter"),
        ("wandb login <<< hunter", "hunter"),
        ("wandb login <<<hunter", "hunter"),
        ("openssl enc -d -pass stdin -in x <<< hunter", "hunter"),
        ("echo hunter | openssl enc -pass stdin", "hunter"),
        ("echo hunter | rclone obscure -", "hunter"),
        ("kinit me <<EOF\nhunter\nEOF\nls", "hunter"),
        ("docker login -u me --password-stdin reg <<EOF\nhunter\nEOF", "hunter"),
        ("docker login -u me --password-stdin <<-'END'\n\thunter\n\tEND", "hunter"),
        ("cat <<EOF | kinit me\nhunter\nEOF", "hunter"),
        ("echo hunter | sudo -u root -S ls", "hunter"),
        ('{"command": "kinit me <<EOF\\nhunter\\nEOF\\nls"}', "hunter"),
        ("++ echo hunter\n+ docker login -u me --password-stdin", "hunter"),
        ("+ docker login -u me --password-stdin\n+ echo hunter\n", "hunter"),
        ("+ printf %s hunter\n+ kinit me\n", "hunter"),
        ("az login --service-principal -u app -p hunter --tenant t", "hunter"),
        ("vault login hunter", "hunter"),
        ('["vault", "login", "-no-print", "hunter"]', "hunter"),
        ("rclone obscure hunter", "hunter"),
        ("mc alias set name https://x.org MYID hunter", "hunter"),
        ("mc config host add name https://x.org MYID hunter --api S3v4", "hunter"),
        ('["mc", "alias", "set", "name", "https://x.org", "MYID", "hunter"]', "hunter"),
        ("smbclient //s/x hunter -U me", "hunter"),
        ("smbclient -W group '//s/x' hunter", "hunter"),
        ("b2 authorize-account myid hunter", "hunter"),
        ("b2 account authorize myid hunter", "hunter"),
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
        "OLDPWD=/home/me pwd: ./project",
        'tokens: [1, 2, 3] and "tokens":[4,5]',
        '["python","train.py","--lr","0.1","-u","x"]',
        "3 tests pass: 2, pass=ok",
        "patience: 3 path=/a/b pattern=x patch: 3",
        "docker run -p 8080:80 image; mkdir -p dir/sub",
        "step 3 token 7",
        "hotkey=ctrl-x turkey: big keynote: x tokenizer=fast tokenizer_name: gpt2",
        "max_tokens=auto num_tokens=12k tokens=4096 tokens: 1,234,567 tokens: 3.5B",
        "tokens/s=12345.6 tokens_per_second: 12.3k tok/s: 12.3k tok=4.1k/s ntokens=17",
        "pad_token=[PAD] eos_token=</s> bos_token='<s>' unk_token=\"<unk>\" padtoken=x",
        "pad_token: <|endoftext|> next_token: the special_tokens=['<a>', '<b>']",
        "key: value",
        "key=name if key != 'loss': {'key': 'layer1.0.weight'}",
        "sorted(d, key=len) sorted(d, key=lambda x: x[1]) sorted(d, key=itemgetter(1))",
        "sort_key=name sortkey=name primary_key=id cache_key: resnet",
        "missing_keys=['layer1.weight'] unexpected_keys: ['fc.bias']",
        "keys: ['loss', 'acc', 'layer1.0.weight'] keys=dict_keys(['a', 'b'])",
        "keys:\n  - loss\n  - acc\nnext: 1",
        "tokens: ['Hello', 'world']",
        "query_key_value.weight: torch.Size([3072, 1024]) past_key_values=DynamicCache()",
        "encoder.layer.0.attention.self.key.weight: float32",
        "tok_embeddings.weight: bfloat16 token_type_ids=tensor([0,1])",
        "(key): Linear(in_features=768, out_features=768, bias=True)",
        "rng_key=Array([0, 42], dtype=uint32)",
        'HF_TOKEN=$(cat ~/.hf_token) HF_TOKEN="$(< /run/token)"',
        "wandb: Use `wandb login --relogin` to force relogin",
        "wandb login failed",
        "please run wandb login before training, or wandb login first",
        "echo done | grep login; echo hello | tee login.txt",
        'echo "$TOKEN" | docker login --password-stdin',
        "git config says the token was refused",
        "echo done | grep kinit; run kinit me first; lftp -u me sftp://x/a,b",
        '{"name": "token", "value": 3.5} {"name": "lr", "value": "hunter"}',
        "- name: HF_TOKEN\n  valueFrom:\n    fieldRef: x",
        "apptainer remote login; apptainer exec -p x.sif a",
        "git config --global user.name Bob; aws s3 cp a b",
        "https://host:8080/path@v1 https://example.org/a:b/c@d",
        "sqlplus /nolog @x.sql; sqlplus @dir/x.sql",
        "vault login failed; run vault login before training, then rclone copy a b",
        "python - <<EOF\nprint(1)\nEOF\ncat <<< hello; kinit me <<EOF\n$PW\nEOF",
        "+ echo training begins\n+ python train.py\n+ echo done",
        "smbclient -L //s; mc alias list; b2 sync a b; az vm list -p x",
        "x ?= 3 y += 4 loss += (a + b)",
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
        "given": [{"name": "PASSWORD", "value": 12}],
        "command": 'TOKEN="a b" python x.py --password "c d"',
        "url": "https://me:pw@host/",
    }
    compact = (",", ":")
    for indent, separators in ((None, None), (1, None), (None, compact)):
        clean, _ = redact(json.dumps(record, indent=indent, separators=separators), "f")
        read = json.loads(clean)
        assert [MARK, "--lr", "0.1"] == read["argv"][2:]
        assert {MARK} == {read["environment"][k] for k in ("WANDB_API_KEY", "PASSWORD")}
        assert MARK == read["given"][0]["value"]
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
        ("WANDB_API_KEY", "mostly"), ("OPENAI_API", "mostly"), ("api", None),
        ("api_version", None), ("apiKey", "always"), ("APIKEY", "always"),
        ("GITHUB_TOKEN", "mostly"), ("dbPassword", "always"), ("PGPASSWORD", "always"),
        ("PWD", "unless a directory"), ("OLDPWD", "unless a directory"), ("DB_PWD", "always"),
        ("GITHUB_PAT", "mostly"), ("PATTERN", None), ("TOKENIZERS_PARALLELISM", None),
        ("keep", None), ("PATH", None), ("MONKEY", None), ("compass", None),
        ("APITOKEN", "mostly"), ("AUTHTOK", "mostly"), ("wandbkey", "mostly"),
        ("MYAPIKEY", "always"), ("githubTokens", "mostly"), ("monkeys", None), ("hotkey", None),
        ("pad_token", None), ("eosToken", None), ("max_tokens", None), ("tokenizer", None),
        ("keyboard", None), ("sort_key", None), ("key", "unless words"), ("tokens", "unless words"),
    ],
)  # fmt: skip
def test_names_of_secrets(name: str, expected: str | None) -> None:
    """By their parts, however they are joined."""
    assert expected == secrecy(name)


HOSTILE = (
    "a=", "token=", "token=1 ", "password=$a;", "--token ", "-u ", "a://", "login ", "machine a ",
    '"', '\\"', 'token="', "token=\\\"", "token=a\\ ", "a: |\n ", "secret: |\n ", "secrets:\n- a\n",
    "-----BEGIN PRIVATE KEY-----", "sshpass ", "key=[", "key={", "x", "eyJ.", "=", "x-a-",
    "authorization:", "password ", "token for a ", "<password>", '("token", ', "a.", "https://a.",
    "$1$", "\n", " ", '"--token",', '"--token","', '"sshpass","-p","', 'sshpass -p\\"', "-u\",",
    "token=(", 'token=("', "token=((a)", "token=$(a ", "token=$(a(b) ", "token=f('", 'token="""',
    "token='", "token='a\n", 'token="a\n', "token+=", "token?=", "key=a.", "keys=[a1,", "tokens=[1",
    "aws ", '\\token=f(\'|-p\\"', "aws configure ", "rclone config create ",
    "rclone config create token ", '"rclone","config","',
    "wandb login ", "wandb login --a ", "echo ", 'echo "', "echo a|", "sudo -S", "sqlplus ",
    "sqlplus -a ", "sqlplus a/", "jdbc:oracle:a:", "a://b:c/", "--password-stdin ",
    "--password-stdin<<<", "echo a|kinit ", "echo a|b/", "kinit ", "kinit<<<", "apptainer login ",
    "lftp ", "lftp -u ", "lftp -u '", "lftp -u a,", '"name": "token", "value": ', "name: token\n",
    '"name":"token","value":"', "sudo -S<<<", "docker login ", "kinit <<EOF\n", "kinit <<E\\n",
    "kinit <<EOF\na\n", "+ echo a\n", "+ echo docker login\n", "+ kinit\n", "+ docker ", "<<E ",
    "<<E|", "az login ", "sudo a ", "vault login ", "vault login -a ", "mc alias set ",
    "smbclient ", "smbclient //", "rclone obscure ",
    "b2 account authorize ", "openssl -pass stdin ", "sudo -a ", "<<E|docker ",
)  # fmt: skip


@pytest.mark.parametrize("unit", HOSTILE)
def test_cost_grows_with_the_length_and_no_faster(unit: str) -> None:
    """Progress bars make lines of megabytes. Sixteen times the text may take sixty-four times as
    long here, in the processor's time; what grows with the square takes 256."""

    def seconds(length: int) -> float:
        text = (unit * (length // len(unit) + 1))[:length]
        times = []
        for _ in range(3):
            began = time.thread_time()
            redact(text, "f")
            times.append(time.thread_time() - began)
        return min(times)

    assert seconds(32768) < 64 * seconds(2048) + 0.05


def test_a_long_text_without_end_is_read_in_time() -> None:
    """It keeps its length but for what goes."""
    text = "a=b " * 20_000 + "x" * 200_000 + "=" * 1000 + "https://" + "y" * 50_000
    clean, _ = redact(text, "f")
    assert len(clean) >= len(text) - 300_000


def test_a_long_number_in_a_list_is_judged_in_time() -> None:
    """It is read once, not in every way in which it can be split into numbers."""
    began = time.thread_time()
    clean, _ = redact(f"tokens: [{'1' * 1000}x]", "f")
    assert f"tokens: {MARK}" == clean
    assert time.thread_time() - began < 5


def test_a_block_keeps_its_lines_and_what_follows() -> None:
    """Line numbers of the list stay true."""
    text = "a: 1\nsecret: |\n  hunter2\n\n  line2\nb: 2\n"
    clean, places = redact(text, "f")
    assert "a: 1\nsecret: |\n  [redacted]\n\n\nb: 2\n" == clean
    assert ["f:3: value of secret"] == [str(place) for place in places]
