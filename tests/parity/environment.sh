# Sourced: sets `python` to an interpreter with requirements.txt, installed once. The working directory is the workspace.
readonly requirements=tests/parity/requirements.txt
hash="$(sha256sum "${requirements}" | cut -c1-16)"
readonly environment="${XDG_CACHE_HOME:-${HOME}/.cache}/trainer_lora/python-${hash}"
if [[ ! -e "${environment}/complete" ]]; then
  echo "parity: installing ${requirements}, once"
  python3 -m venv --clear "${environment}"
  "${environment}/bin/pip" install --quiet --disable-pip-version-check --requirement "${requirements}"
  touch "${environment}/complete"
fi
readonly python="${environment}/bin/python"
