"""Interchange with other programs: explanations of activations in a parquet file; released pairs of
a verbalizer and a reconstructor, and their rows in the table of controls.

The layout of a pair is that of github.com/kitft/natural_language_autoencoders (README,
nla_inference.py): two folders of the Hugging Face layout, av and ar, each with nla_meta.yaml. The
verbalizer reads a prompt in which the activation, scaled to a fixed norm, replaces one token's
embedding, and answers <explanation>…</explanation>. The reconstructor ends with the layer's block;
value_head.safetensors maps that block's output at the prompt's last token to a direction, without a
norm.

Shapes: B activations, D features, T tokens.
"""

import math
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import load_file
from torch import Tensor, nn

from datamodules.activations.datamodule import ActivationDataModule
from datamodules.activations.interchange import COLUMN, VectorFile, write_vectors
from datamodules.activations.store import ActivationStore
from lit_models.causal_lm.pretrained import load_network, model_of, read_recipe
from lit_models.consistency_lens.controls import Baselines, Fidelity, FidelityTable, Rows
from lit_models.consistency_lens.lens import AT_ONCE, best_reading, index_of, worth
from lit_models.consistency_lens.subject import PatchedSubject, Subject, outputs_of, read
from lit_models.training.metrics import evaluating

if TYPE_CHECKING:
    from lit_models.consistency_lens.module import LitConsistencyLens

NAMES = {"av": ("av", "verbalizer", "actor"), "ar": ("ar", "reconstructor", "critic")}
META, VALUE_HEAD = "nla_meta.yaml", "value_head.safetensors"
EXPLANATION = re.compile(r"<explanation>\s*(.*?)\s*</explanation>", re.DOTALL)
ROWS = ("greedy", "zero", "mean", "position_mean", "token_mean", "shuffled_examples")
PAIR_AT_ONCE = 16  # activations that a pair explains


@torch.no_grad()
def explain_vectors(
    module: "LitConsistencyLens", source: str | Path, target: str | Path, best_of: int = 1
) -> None:
    """Write the rows of a parquet file plus explanation, confidence, cosine and fve of each
    activation, as in `Reading`, and a sidecar; few rows are in memory at a time.

    Raises:
        FileNotFoundError: the file or its sidecar is missing.
        FileExistsError: the target exists.
        ValueError: the activations are of another width, layer or subject than the lens's.
    """
    file, subject = VectorFile.open(source), module.recipe["subject"]
    layer = file.layer if file.layer in module.layers else subject["layer"]
    own = {"width": subject["hidden_size"], "layer": layer, "subject": subject["digest"]}
    known = {name: getattr(file, name) for name in own}
    changed = [n for n, value in known.items() if value is not None and value != own[n]]
    if changed:
        diff = "; ".join(f"{n}: {known[n]} there, {own[n]} here" for n in changed)
        raise ValueError(
            f"{file.path} holds other activations ({diff}) than this lens explains; use a lens for "
            "these, or activations of this lens's subject and layer."
        )

    index = index_of(module.layers, file.layer)

    def pieces() -> Iterator[dict[str, Any]]:
        lens, first = module.lens, 0
        for rows, activations in file.pieces():
            explanations: list[str] = []
            numbers: list[torch.Tensor] = []
            for true in torch.from_numpy(activations).to(lens.mean).split(AT_ONCE):
                keys = torch.arange(first, first + len(true), device=true.device)
                layer = lens.rows_of(index, len(true))
                one = best_reading(lens, true, keys, best_of, layer)
                explanations += [module.tokenizer.decode(ids) for ids in one.token_ids.tolist()]
                numbers.append(torch.stack(worth(lens, true, one, layer), dim=1))
                first += len(true)
            columns = {name: rows.column(name) for name in rows.schema.names if name != COLUMN}
            values = torch.cat(numbers).float().cpu().numpy().T
            named = dict(zip(("confidence", "cosine", "fve"), values, strict=True))
            yield {COLUMN: activations, **columns, "explanation": explanations, **named}

    facts = {"d_model": file.width, "layer_index": module.layers[index]}
    more = {"unisono": {"subject": own["subject"], "best_of": best_of}}
    with evaluating(module):
        write_vectors(Path(target).expanduser(), facts | more, pieces(), "choose another name")


class ActivationPair(nn.Module):
    """Verbalizer and reconstructor from one folder in the layout above, on the CPU in eval mode.

    Raises:
        FileNotFoundError: a folder or a file in it is missing.
        ValueError: nla_meta.yaml does not fit the models or their tokenizers.
    """

    value_head: Tensor  # [D, D]

    def __init__(self, folder: str | Path) -> None:
        from transformers import AutoTokenizer

        super().__init__()
        root = Path(folder).expanduser()
        self.folders, self.metas, self.tokenizers = {}, {}, {}
        for role, names in NAMES.items():
            part = next((root / name for name in names if (root / name / META).is_file()), None)
            if part is None:
                raise FileNotFoundError(
                    f"{root} holds no folder {' or '.join(names)} with a {META}: put the released "
                    "verbalizer into its av and the reconstructor into its ar."
                )
            self.folders[role] = part
            self.metas[role] = yaml.safe_load((part / META).read_text("utf-8"))
            self.tokenizers[role] = AutoTokenizer.from_pretrained(part, local_files_only=True)
        self.width, tokens = int(self.metas["av"]["d_model"]), self.metas["av"]["tokens"]
        self.layer: int | None = self.metas["ar"].get("extraction_layer_index")
        scale = self.metas["av"].get("extraction", {}).get("injection_scale", "sqrt_d_model")
        is_root = scale == "sqrt_d_model"
        self.scale = math.sqrt(self.width) if is_root else None if scale is None else float(scale)
        question = self._template("av").replace("{injection_char}", tokens["injection_char"])
        chat = [{"role": "user", "content": question}]
        options: Any = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
        encoding: Any = self.tokenizers["av"].apply_chat_template(chat, **options)
        self.prompt: list[int] = list(encoding["input_ids"])
        names = ("left_neighbor_id", "token_id", "right_neighbor_id")
        around = [tokens[f"injection_{name}"] for name in names]
        places = [i for i in range(len(self.prompt)) if self.prompt[i : i + 3] == around]
        if len(places) != 1:
            raise ValueError(
                f"{self.folders['av']}: the prompt holds the tokens {around} of its {META} "
                f"{len(places)} times, and must once; the tokenizer is not the one of the release."
            )
        self.place = places[0] + 1
        content = read_recipe(self.folders["av"])["config"]
        self.verbalizer: Any = model_of(content, self.folders["av"]).eval()
        self.reconstructor = load_network(self.folders["ar"]).eval()
        (value_head,) = load_file(self.folders["ar"] / VALUE_HEAD).values()
        self.register_buffer("value_head", value_head.float())

    @torch.no_grad()
    def explain(self, activations: Tensor, max_new_tokens: int = 200) -> list[str]:
        """Return the verbalizer's explanations of activations [B, D], decoded greedily."""
        device = self.value_head.device
        table = self.verbalizer.get_input_embeddings()
        ids = torch.tensor([self.prompt], device=device).expand(len(activations), -1)
        embeddings = table(ids).clone()  # [B, T, D]
        entering = activations.to(device).float()
        if self.scale is not None:
            entering = F.normalize(entering, dim=-1) * self.scale
        embeddings[:, self.place] = entering.to(embeddings.dtype)
        options = {"max_new_tokens": max_new_tokens, "do_sample": False}
        mask, end = torch.ones_like(ids), self.tokenizers["av"].eos_token_id
        options |= {"pad_token_id": end if end is not None else 0}
        written = self.verbalizer.generate(inputs_embeds=embeddings, attention_mask=mask, **options)
        texts = self.tokenizers["av"].batch_decode(written, skip_special_tokens=True)
        return [match[1] if (match := EXPLANATION.search(text)) else text.strip() for text in texts]

    @torch.no_grad()
    def rebuild(self, explanations: Sequence[str]) -> Tensor:
        """Return the rebuilt directions [B, D], of norm 1."""
        network, directions = self.reconstructor, []
        for text in explanations:
            prompt = self._template("ar").replace("{explanation}", text)
            ids = torch.tensor([self.tokenizers["ar"](prompt)["input_ids"]])
            ids = ids.to(self.value_head.device)
            (hidden,) = outputs_of(network.blocks()[-1:], partial(read, network, ids))
            directions.append(F.linear(hidden[0, -1].float(), self.value_head))
        return F.normalize(torch.stack(directions), dim=-1)

    def _template(self, role: str) -> str:
        templates = self.metas[role]["prompt_templates"]
        return templates.get(role) or templates[NAMES[role][2]]


@torch.no_grad()
def pair_rows(
    pair: ActivationPair,
    subject: Subject,
    data: ActivationDataModule,
    most: int | None = None,
    max_new_tokens: int = 200,
) -> dict[str, Rows]:
    """Return a pair's scores, group -> row of `ROWS` -> value's name -> value, as in a lens's
    `controls.json`.

    Rebuilt directions are scaled to the mean norm of the training part.

    Args:
        pair: of the subject's width.
        subject: for the effect on its next tokens.
        data: with a store; its test part is scored.
        most: number of activations, from the first on; `None` takes all.

    Raises:
        ValueError: the store has another width or layer.
    """
    data.setup("test")
    store, dataset = data.store, data.datasets["test"]
    facts = store.subject if len(data.stores) == 1 else None
    if (
        facts is None
        or not isinstance(store, ActivationStore)
        or (facts.hidden_size, facts.layer) != (pair.width, pair.layer)
    ):
        raise ValueError(
            f"the pair reads {pair.width} features of block {pair.layer}, and the data hold "
            f"{facts}; dump activations of that model and layer, and name the store with "
            "data.activations."
        )
    statistics = store.statistics
    device = pair.value_head.device
    baselines = Baselines(statistics, subject.network.embedding.weight.shape[0]).to(device)
    mean, length = baselines.mean, statistics.norms[0]
    table = FidelityTable(ROWS, data.facts(2).group_names).to(device)
    count = len(dataset.lengths) if most is None else min(most, len(dataset.lengths))
    for first in range(0, count, PAIR_AT_ONCE):
        numbers = np.arange(first, min(first + PAIR_AT_ONCE, count))
        on_host: Any = dataset.batch(numbers, 0)
        other = on_host.pop("other")["activation"]
        batch: Any = {name: value.to(device) for name, value in on_host.items()}
        batch["weight"] = torch.ones(len(numbers), device=device)
        true, position = batch["activation"].float(), batch["position"]
        current = batch["input_ids"].gather(1, position[:, None])[:, 0]
        own, others = (
            pair.rebuild(pair.explain(x, max_new_tokens)) * length for x in (true, other)
        )
        rebuilt = (
            *(own, torch.zeros_like(true), mean.expand_as(true)),
            *(baselines.of_position(position, mean), baselines.of_token(current, mean), others),
        )
        patched = PatchedSubject(subject, batch)
        scores = {}
        for name, values in zip(ROWS, rebuilt, strict=True):
            scores[name] = Fidelity.of(true, values, mean, baselines.unit_mean, patched)
        table.update(scores, batch)
    return table.compute()
