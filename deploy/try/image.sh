#!/bin/bash
# Build the image with buildah on a base of Debian's own packages, and run it: for machines that reach no container registry.
#
#   sudo deploy/try/image.sh [FOLDER]        # FOLDER keeps the base and the storage (6 GB); default build/try-image
#
# The base replaces python:3.11-slim: Debian bookworm by debootstrap, with its Python 3.11. Everything else is the
# Dockerfile as it is. Build steps run in a chroot (--isolation chroot), so that no OCI runtime, cgroup or network bridge is
# needed. pip uses this machine's settings, mirrors included.
set -euo pipefail
here=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mkdir -p "${1:-$here/build/try-image}" && cd "${1:-$here/build/try-image}" && pwd)
export STORAGE_DRIVER=overlay BUILDAH_ISOLATION=chroot
buildah() { command buildah --root "$work/storage" --runroot "$work/run" "$@"; }
step() { printf '\n==> %s  (%s)\n' "$1" "$(date +%H:%M:%S)"; }

[ "$(id -u)" = 0 ] || { echo "Error: run as root (debootstrap and chroot need it)"; exit 1; }
for tool in buildah debootstrap; do
    command -v $tool >/dev/null || { echo "Error: no $tool: apt-get install buildah debootstrap"; exit 1; }
done

step "1/4 base: Debian bookworm by debootstrap"
if [ ! -e "$work/base.done" ]; then
    rm -rf "$work/base"
    debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv,python-is-python3 \
        bookworm "$work/base" "${DEBIAN_MIRROR:-http://deb.debian.org/debian}" >"$work/debootstrap.log" 2>&1 \
        || { tail -5 "$work/debootstrap.log"; exit 1; }
    touch "$work/base.done"
fi
if ! buildah images --quiet docker.io/library/python:3.11-slim >/dev/null 2>&1; then
    container=$(buildah from scratch)
    buildah add --quiet "$container" "$work/base" / >/dev/null
    buildah commit --quiet --rm "$container" docker.io/library/python:3.11-slim >/dev/null
fi

step "2/4 build: deploy/Dockerfile"
# This machine's certificates, pip.conf and local package folders, read-only, so that a mirror works inside too.
mounts=(--volume /etc/ssl/certs:/etc/ssl/certs:ro)
[ ! -e /etc/pip.conf ] || mounts+=(--volume /etc/pip.conf:/etc/pip.conf:ro)
for folder in $(python3 -m pip config list | grep -oE '/[A-Za-z0-9._/-]+' | sed 's#^//*#/#' | sort -u); do
    folder=${folder%/simple}  # an index points at files beside it
    [ ! -d "$folder" ] || mounts+=(--volume "$folder:$folder:ro")
done
find_links=$(python3 -m pip config list | sed -n "s/.*find-links='\(.*\)'/\1/p" | head -1)
indexes=$(python3 -m pip config list | sed -n "s/.*extra-index-url='\(.*\)'/\1/p" | head -1)
buildah bud --pull-never --layers --format docker --file "$here/deploy/Dockerfile" "${mounts[@]}" \
    --env PIP_FIND_LINKS="$find_links" --env PIP_EXTRA_INDEX_URL="$indexes" \
    --env NODE_EXTRA_CA_CERTS=/etc/ssl/certs/ca-certificates.crt \
    --build-arg PYTHON=3.11 --build-arg TORCH="${TORCH:-torch==2.13.0}" \
    --build-arg TORCH_INDEX="${TORCH_INDEX:-https://pypi.org/simple}" \
    --tag loramux:cpu "$here"

step "3/4 what is in it"
container=$(buildah from --pull-never loramux:cpu)
trap 'buildah umount "$container" >/dev/null; buildah rm "$container" >/dev/null' EXIT
buildah inspect --type image --format '{{.OCIv1.Config.User}} {{.OCIv1.Config.Entrypoint}} {{.OCIv1.Config.Cmd}}' loramux:cpu
buildah images --format '{{.Name}}:{{.Tag}} {{.Size}}' | grep loramux
root=$(buildah mount "$container")
python3 - "$root/usr/share/loramux/sbom.json" <<'PYTHON'
import json, sys
document = json.load(open(sys.argv[1]))
names = {one["name"].lower(): one["version"] for one in document["components"]}
print(f"SBOM: {document['bomFormat']} {document['specVersion']}, {len(names)} packages, torch {names['torch']}")
assert {"loramux", "loramux-client", "torch", "litestar"} <= names.keys()
PYTHON

step "4/4 run it: as its user, on the demo's base, one request"
run() { buildah run --user 10001:10001 --volume "$here/demo/loramux_demo/assets/base:/srv/models/base:ro" "$@"; }
run "$container" -- sh -c 'id -u; ! touch /etc/loramux/x 2>/dev/null; loramux --version'
cat >"$work/sqlite.toml" <<'TOML'
[model]
path = "/srv/models/base"
served_model_name = "base"
[engine]
pool_bytes = 67_108_864
[server]
internal_port = 19090
port = 18000
[records]
url = "sqlite:////var/lib/loramux/loramux.sqlite3"
blobs = "/var/lib/loramux/blobs"
cache = "/var/lib/loramux/cache"
pepper_file = "/var/lib/loramux/pepper"
TOML
run --volume "$work/sqlite.toml:/etc/loramux/loramux.toml:ro" "$container" -- python - <<'PYTHON'
import json, subprocess, time, urllib.request

def loramux(*arguments):
    return json.loads(subprocess.run(["loramux", *arguments, "--json"], check=True, capture_output=True, text=True).stdout)

loramux("tenant", "create", "acme")
key = loramux("key", "create", "--tenant", "acme")["key"]
server = subprocess.Popen(["loramux", "serve", "--json"], stdout=subprocess.PIPE, text=True)
try:
    print(json.loads(server.stdout.readline())["status"])
    body = json.dumps({"model": "base", "prompt": "Q: Who is Halkodel?\nA: ", "max_tokens": 12}).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request("http://127.0.0.1:18000/v1/completions", body, headers)) as answer:
        print(json.load(answer)["choices"][0]["text"])
    # The image's own HEALTHCHECK asks port 9090; this settings file has another.
    print(urllib.request.urlopen("http://127.0.0.1:19090/health/ready").status)
finally:
    server.terminate()
    assert server.wait(60) == 0
PYTHON
step "the image works"
