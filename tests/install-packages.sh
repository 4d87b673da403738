#!/bin/bash
# Installs $PACKAGES from Debian's packages if one of them is missing.
# Without root, or without apt: says what to install; fatal in CI, where nothing may be skipped.
missing=
for package in $PACKAGES; do
    case $package in
        slurmctld | slurmd | slurmdbd) [ -x "/usr/sbin/$package" ] || missing="$missing $package" ;;
        mariadb-server) [ -x /usr/sbin/mariadbd ] || missing="$missing $package" ;;
        slurm-wlm-mysql-plugin) ls /usr/lib/*/slurm-wlm/accounting_storage_mysql.so >/dev/null 2>&1 || missing="$missing $package" ;;
        slurm-client) command -v sbatch >/dev/null || missing="$missing $package" ;;
        e2fsprogs) [ -x /usr/sbin/mkfs.ext4 ] || [ -x /sbin/mkfs.ext4 ] || missing="$missing $package" ;;
        util-linux) command -v unshare >/dev/null && command -v setpriv >/dev/null || missing="$missing $package" ;;
        gromacs) command -v gmx >/dev/null || missing="$missing $package" ;;
        lammps) command -v lmp >/dev/null || missing="$missing $package" ;;
        quantum-espresso) command -v pw.x >/dev/null || missing="$missing $package" ;;
        charliecloud) command -v ch-run >/dev/null || missing="$missing $package" ;;
        r-base-core) command -v Rscript >/dev/null || missing="$missing $package" ;;
        munge) [ -x /usr/sbin/munged ] || missing="$missing $package" ;;
        python3-venv) "${PYTHON:-python3}" -c 'import ensurepip' 2>/dev/null || missing="$missing $package" ;;
        *) command -v "$package" >/dev/null || missing="$missing $package" ;;
    esac
done
[ -z "$missing" ] && exit 0

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing:$missing"
    # The daemons of the suite are its own: none may be started by the packages.
    policy=/usr/sbin/policy-rc.d
    made=
    if [ ! -e "$policy" ]; then
        printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod +x "$policy" && made=yes
    fi
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq &&
        # shellcheck disable=SC2086 # a list of names
        apt-get install -y -qq --no-install-recommends $missing >/dev/null
    code=$?
    [ -n "$made" ] && rm -f "$policy"
    exit "$code"
fi

echo "missing:$missing" >&2
echo "install them as root, on Debian or Ubuntu: apt-get install --no-install-recommends$missing" >&2
case " $missing " in *" python3-venv "*) exit 1 ;; esac
[ "${CI-}" = true ] && exit 1
echo "going on without: the tests that need them are skipped, by name" >&2
