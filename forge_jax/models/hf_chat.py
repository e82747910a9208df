"""Tokenizer and chat format of a Hugging Face folder.

`tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja` and
`generation_config.json` flow in and become a `Chat`; the same files flow out. What
their formats cannot say (a turn that ends without a special token, how tool calls are
written) is kept in `tokenizer_config.json` under a key of our own.
"""

import json
import logging
from pathlib import Path
from typing import Any

from forge_jax.config import UserError
from forge_jax.models.chat import (
    Chat,
    ChatFormat,
    built_in,
    compiled,
    reasoning_of,
    tool_format_of,
)
from forge_jax.models.hf_files import read_json
from forge_jax.models.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer

OWN = "forge_jax"
OTHER_TOKENIZERS = ("tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")
log = logging.getLogger(__name__)


def read_chat(folder: Path, vocab: int) -> Chat:
    """The chat of a folder whose model has `vocab` ids.

    A folder without any tokenizer gets bytes and ChatML, and a warning. Raises UserError on
    a tokenizer without `tokenizer.json` or with more ids than the model.
    """
    if not (folder / "tokenizer.json").exists():
        for name in OTHER_TOKENIZERS:
            if (folder / name).exists():
                raise UserError(f"{folder}: has {name} but no tokenizer.json")
        log.warning("%s has no tokenizer: using bytes and ChatML", folder)
        return Chat(tokenizer=ByteTokenizer(), format=built_in("chatml"))
    tokenizer = JsonTokenizer(folder / "tokenizer.json")
    if tokenizer.vocab_size > vocab:
        raise UserError(
            f"{folder / 'tokenizer.json'}: {tokenizer.vocab_size} ids, the model has {vocab}"
        )
    settings = _optional_json(folder / "tokenizer_config.json")
    stops = _stop_ids(folder)
    try:
        return Chat(
            tokenizer=tokenizer,
            format=_format(folder, settings, tokenizer, stops),
            extra_stop_ids=stops,
        )
    except ValueError as error:
        raise UserError(f"{folder}: {error}") from error


def write_chat(
    folder: Path, tokenizer: Tokenizer, chat_format: ChatFormat | None
) -> dict[str, Any]:
    """Writes the tokenizer's and the format's files; gives what `config.json` says of them."""
    tokenizer.save(folder)
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    facts: dict[str, Any] = {}
    if chat_format is not None:
        (folder / "chat_template.jinja").write_text(chat_format.template, encoding="utf-8")
        settings[OWN] = {
            "end_of_turn": chat_format.end_of_turn,
            "tool_format": chat_format.tool_format,
            "reasoning": chat_format.reasoning,
        }
        eos = tokenizer.special_id(chat_format.end_of_turn)
        if eos is not None:
            settings["eos_token"] = chat_format.end_of_turn
            facts["eos_token_id"] = eos
        if chat_format.bos_token:
            settings["bos_token"] = chat_format.bos_token
    text = json.dumps(settings, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    return facts


def _format(
    folder: Path, settings: dict[str, Any], tokenizer: Tokenizer, stops: tuple[int, ...]
) -> ChatFormat:
    own = settings.get(OWN, {})
    eos = _token(settings.get("eos_token")) or (tokenizer.decode(stops[:1]) if stops else "")
    end_of_turn = own.get("end_of_turn", eos)
    if not end_of_turn:
        raise UserError(f"{folder / 'tokenizer_config.json'}: no eos_token to end a turn with")
    template = _template(folder, settings)
    if template is None:
        log.warning("%s has no chat template: using ChatML", folder)
        template = built_in("chatml").template
    compiled(template)
    return ChatFormat(
        template=template,
        end_of_turn=end_of_turn,
        tool_format=own.get("tool_format", tool_format_of(template)),
        reasoning=own.get("reasoning", reasoning_of(template)),
        bos_token=_token(settings.get("bos_token")),
        eos_token=eos,
    )


def _template(folder: Path, settings: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    stored = settings.get("chat_template")
    if isinstance(stored, list):  # named templates
        stored = {entry["name"]: entry["template"] for entry in stored}.get("default")
    return stored


def _token(value: Any) -> str:
    """A special token's text, which is stored as text or as an object; "" for none."""
    return value["content"] if isinstance(value, dict) else value or ""


def _stop_ids(folder: Path) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        ids = _optional_json(folder / name).get("eos_token_id")
        if ids is not None:
            return tuple(ids) if isinstance(ids, list) else (ids,)
    return ()


def _optional_json(file: Path) -> dict[str, Any]:
    return read_json(file) if file.exists() else {}
