"""The accounting of a devcluster: a private mariadbd and slurmdbd, for tests that need sacct.

Only text: configuration and command lines. devcluster_daemons.py starts and ends them; everything
they write lies in the cluster's own directory.
"""

from __future__ import annotations

import os

from devcluster_conf import Layout

DATABASE = "slurm_acct_db"
PACKAGES = {
    "slurmdbd": "slurmdbd",
    "mariadbd": "mariadb-server",
    "mariadb-install-db": "mariadb-server",
    "setsid": "util-linux",
}
PLUGIN = "accounting_storage_mysql.so"
PLUGIN_PACKAGE = "slurm-wlm-mysql-plugin"


def slurm_conf_lines(layout: Layout, *, limits: bool = False) -> str:
    """The munge socket stands where a password would: slurmctld asks no other one."""
    return (
        "AccountingStorageType=accounting_storage/slurmdbd\n"
        "AccountingStorageHost=localhost\n"
        f"AccountingStoragePort={layout.dbd_port}\n"
        f"AccountingStoragePass={layout.munge_socket}"
        + ("\nAccountingStorageEnforce=limits,qos" if limits else "")
    )


def slurmdbd_conf(layout: Layout, *, user: str, password: str) -> str:
    """Found beside slurm.conf; slurmdbd refuses it unless its mode is 600."""
    return f"""\
AuthType=auth/munge
AuthInfo=socket={layout.munge_socket}
DbdHost=localhost
DbdPort={layout.dbd_port}
SlurmUser={user}
LogFile={layout.dbd_log}
PidFile={layout.root}/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={layout.database_port}
StorageUser=slurm
StoragePass={password}
StorageLoc={DATABASE}
"""


def grants(password: str) -> str:
    """SQL that mariadbd runs when it starts; one statement a line."""
    return (
        f"CREATE DATABASE {DATABASE};\n"
        f"CREATE USER 'slurm'@'127.0.0.1' IDENTIFIED BY '{password}';\n"
        f"GRANT ALL ON {DATABASE}.* TO 'slurm'@'127.0.0.1';\n"
    )


def install_command(programs: dict[str, str], layout: Layout) -> list[str]:
    return [
        programs["mariadb-install-db"],
        *_shared_options(layout),
        "--skip-test-db",
        "--auth-root-authentication-method=socket",
    ]


def server_command(programs: dict[str, str], layout: Layout) -> list[str]:
    """It never goes to the background by itself."""
    return [
        programs["setsid"],
        "--fork",
        programs["mariadbd"],
        *_shared_options(layout),
        f"--socket={layout.root}/run/mariadb.socket",
        f"--pid-file={layout.root}/run/mariadbd.pid",
        f"--log-error={layout.root}/log/mariadbd.log",
        f"--init-file={layout.root}/run/grants.sql",
        "--bind-address=127.0.0.1",
        f"--port={layout.database_port}",
        "--skip-name-resolve",
        # Nothing of it has to survive the machine.
        "--innodb-flush-log-at-trx-commit=0",
        "--innodb-buffer-pool-size=32M",
    ]


def _shared_options(layout: Layout) -> list[str]:
    """--no-defaults comes first: the machine's own configuration names the machine's own places."""
    as_root = ["--user=root"] if os.geteuid() == 0 else []
    return [
        "--no-defaults",
        f"--datadir={layout.database}",
        "--innodb-log-file-size=8M",
        *as_root,
    ]
