#!/usr/bin/env bash
# The C++ operators on Arm, emulated: they are cross-compiled, and tests/kernels runs in an Arm Python under qemu-user.
#
#   tools/emulated_arm.sh FOLDER [LEVEL] [TEST...]
#
# FOLDER keeps the Arm Python and its packages (about 700 MB). LEVEL is a -march of `loramux_kernels.native.prebuilt`.
# Needs Debian 12 or Ubuntu, root, and: apt-get install g++-aarch64-linux-gnu qemu-user unzip python3-pip
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
folder=$(mkdir -p "$1" && cd "$1" && pwd)
level=${2:-armv8.2-a+fp16+dotprod+bf16+i8mm}
tests=("${@:3}")
[ ${#tests[@]} -gt 0 ] || tests=(packed_linear format_choice lora paged_attention layer_operators kv_cache token_draws)

if [ ! -e "$folder/root/usr/bin/python3.11" ]; then
  dpkg --add-architecture arm64
  apt-get update -qq
  mkdir -p "$folder/packages" "$folder/root"
  (
    cd "$folder/packages"
    names=(python3.11-minimal libpython3.11-minimal libpython3.11-stdlib libc6 libstdc++6 libgcc-s1 zlib1g libexpat1 libssl3)
    names+=(libffi8 libbz2-1.0 liblzma5 libuuid1 libsqlite3-0 libtinfo6 libcrypt1)
    apt-get download -qq "${names[@]/%/:arm64}"
    for package in *.deb; do dpkg -x "$package" "$folder/root"; done
  )
fi
if [ ! -e "$folder/site/torch" ]; then
  # torch 2.9 is the last whose wheel for Arm needs no CUDA libraries.
  packages=(torch==2.9.1 numpy typing_extensions sympy mpmath filelock networkx jinja2 markupsafe fsspec)
  packages+=(pytest pluggy iniconfig packaging pygments msgspec hypothesis sortedcontainers safetensors)
  packages+=(httpx httpcore h11 certifi idna anyio sniffio pytest-xdist execnet)
  python3 -m pip download -q --no-deps --only-binary :all: --python-version 311 --dest "$folder/wheels" \
    --platform manylinux_2_28_aarch64 --platform manylinux2014_aarch64 --platform manylinux_2_17_aarch64 "${packages[@]}"
  for wheel in "$folder"/wheels/*.whl; do unzip -qo "$wheel" -d "$folder/site"; done
fi

# The emulated process asks for its own processor; the cross compiler knows none, and gets the level.
cat > "$folder/c++" <<COMPILER
#!/usr/bin/env bash
exec aarch64-linux-gnu-g++ "\${@/-mcpu=native/-march=$level}"
COMPILER
chmod +x "$folder/c++"

cd "$root"
PYTHONPATH="$folder/site:$root/kernels:$root/adapters:$root/platform" CXX="$folder/c++" LORAMUX_CACHE_DIR="$folder/cache" \
  qemu-aarch64 -cpu max -L "$folder/root" "$folder/root/usr/bin/python3.11" -m pytest -q -p no:cacheprovider -k "not beyond_32_bits" \
  $(printf "tests/kernels/test_%s.py " "${tests[@]}")
