"""`mupax completion`: scripts that complete commands, flags and configs in a shell."""

import json

from .command import COMMANDS
from .flags import list_configs

SHELLS = ("bash", "zsh", "fish")

_BASH = """\
_mupax() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}}
  [[ $word == "=" ]] && word=""
  [[ $before == "=" ]] && before=${{COMP_WORDS[COMP_CWORD-2]}}
  COMPREPLY=()
  if [[ $COMP_CWORD -eq 1 ]]; then
    COMPREPLY=($(compgen -W "{commands}" -- "$word"))
  elif [[ $before == "--config" ]]; then
    COMPREPLY=($(compgen -W "{configs}" -- "$word") $(compgen -f -X '!*.py' -- "$word"))
  elif [[ $word == -* ]]; then
    local flags=""
    case ${{COMP_WORDS[1]}} in
{cases}
    esac
    COMPREPLY=($(compgen -W "$flags" -- "$word"))
  else
    COMPREPLY=($(compgen -f -- "$word"))
  fi
}}
complete -o filenames -F _mupax mupax
"""


def script(shell: str) -> str:
    """The completion script of one of `SHELLS`."""
    flags = {
        name: [f"--{flag.name}" for flag in command.shown() if "=" not in flag.name]
        for name, command in COMMANDS.items()
    }
    if shell == "fish":
        return _fish(flags)
    cases = "\n".join(
        f'      {name}) flags="{" ".join([*words, "--help"])}" ;;'
        for name, words in flags.items()
    )
    text = _BASH.format(
        commands=" ".join(flags), configs=" ".join(list_configs()), cases=cases
    )
    start = "autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    return start + text


def _fish(flags: dict[str, list[str]]) -> str:
    lines = ["complete -c mupax -f"]
    for name, words in flags.items():
        summary = json.dumps(COMMANDS[name].summary, ensure_ascii=False)
        start = f"complete -c mupax -n __fish_use_subcommand -a {name}"
        lines.append(f"{start} -d {summary}")
        for word in words:
            of = f"complete -c mupax -n '__fish_seen_subcommand_from {name}'"
            choices = f" -xa '{' '.join(list_configs())}'" if word == "--config" else ""
            lines.append(f"{of} -l {word.removeprefix('--')}{choices or ' -r'}")
    return "\n".join(lines) + "\n"
