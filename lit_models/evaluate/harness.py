"""A language model for lm-eval, and the predictions that answer its requests.

lm-eval requests all log-likelihoods of all tasks at once, then all texts. Each of these lists is
the dataset of one prediction, whose batches do not depend on the devices. Every process runs the
same evaluator, as if it were the only one, and reads the same answers. Documents are tokenised, cut
and scored as by lm-eval's `hf` model.
"""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, handle_non_serializable, make_disjoint_window

from datamodules.core.store import digest_of, file_digest, new_file, write_whole
from datamodules.text.prompts import ChoiceDataset, Prompt, PromptDataset
from datamodules.text.texts import LanguageModelDataModule
from datamodules.tokenizers.text import TextTokenizer, TokenizerOptions, make_tokenizer
from lit_models import LitCausalLM
from lit_models.causal_lm.generation import GenerationOptions
from lit_models.causal_lm.pretrained import read_recipe, text_config
from lit_models.cli import UnisonoCLI, say_first
from lit_models.config_files import did_you_mean, near_names
from lit_models.errors import UsageError, usage_errors
from lit_models.run_files import read_checkpoint
from lit_models.training.rules import is_first_process

SCORES = GenerationOptions(mode="score")
# Generation options that a task may set besides `until` and the number of tokens.
KNOWN = {"do_sample", "temperature", "top_k", "top_p"}


class RequestDataModule(LanguageModelDataModule):
    """Datamodule of requests in memory; their answers go to the file `answers`."""

    requests: PromptDataset
    answers: Path

    def __init__(self, global_batch_size: int = 64, **planned: Any) -> None:
        super().__init__(global_batch_size=global_batch_size, context_length=1, **planned)

    def build_prompts(self) -> PromptDataset:
        return self.requests

    @property
    def predict_output_path(self) -> Path:
        return self.answers

    def write_predictions(self, results: dict[str, np.ndarray], path: Path) -> None:
        arrays: dict[str, Any] = results
        with new_file(path, "wb") as file:
            np.savez(file, **arrays)


class PlannedLM(TemplateLM):
    """A language model of lm-eval; its answers come from `ask`.

    Args:
        max_length: number of positions of the model; longer contexts are cut from the left.
        ask: takes a dataset and generation options; returns the prediction, name -> [N, …].
        seed: seed of tasks that sample.
    """

    def __init__(self, tokenizer: TextTokenizer, max_length: int, ask: Any, seed: int = 0) -> None:
        super().__init__()
        self.text_tokenizer, self.max_length = tokenizer, max_length
        self.ask, self.seed = ask, seed

    @property
    def eot_token_id(self) -> int:
        return self.text_tokenizer.end_id

    @property
    def prefix_token_id(self) -> int:
        begin = self.text_tokenizer.begin_id
        return self.eot_token_id if begin is None else begin

    def tok_encode(self, string: str, add_special_tokens: bool = True, **_: Any) -> list[int]:
        """Return the tokens of a text, after the prefix that the model's own tokenizer adds."""
        tokenizer = self.text_tokenizer
        (encoding,) = tokenizer.encode_with_offsets([string])
        begin = tokenizer.decode([self.prefix_token_id], skip_special_tokens=False)
        is_more = add_special_tokens and not string.startswith(begin)
        return tokenizer.backend.post_process(encoding, add_special_tokens=is_more).ids

    @property
    def tokenizer_name(self) -> str:
        return self.text_tokenizer.digest

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return the text of a chat; without a generation prompt, its last message stays open."""
        text = self.text_tokenizer.render(chat_history, add_generation_prompt)
        last = chat_history[-1]["content"]
        return text if add_generation_prompt else text[: text.rindex(last) + len(last)]

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        rows = []
        for _text, context, continuation in requests:
            if not continuation or len(continuation) > self.max_length:
                raise ValueError(
                    f"a continuation has {len(continuation)} tokens, and must have 1 to "
                    f"{self.max_length}, the positions of the model; shorten the task's choices."
                )
            ids = [*(context or [self.prefix_token_id]), *continuation][-(self.max_length + 1) :]
            rows.append([Prompt(ids, len(continuation), 0)])
        answers = self.ask(ChoiceDataset(rows), SCORES)
        columns = (answers[name][:, 0].tolist() for name in ("scores", "is_greedy"))
        return list(zip(*columns, strict=True))

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        windows: list[tuple[None, list[int], list[int]]] = []
        counts = []
        for request in requests:
            ids = self.tok_encode(request.args[0])
            parts = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1)
            windows += [(None, *make_disjoint_window(window)) for window in parts]
            counts.append(len(windows))
        nats = [score for score, _ in self._loglikelihood_tokens(windows)] if windows else []
        return [sum(nats[a:b]) for a, b in zip([0, *counts], counts, strict=False)]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
        texts = [""] * len(requests)
        for members in groups.values():
            written = self._written([requests[i].args[0] for i in members], requests[members[0]])
            for number, text in zip(members, written, strict=True):
                texts[number] = text
        return texts

    def _written(self, contexts: Sequence[str], request: Instance) -> list[str]:
        """Return the text generated after each context, with the options of one request."""
        options = dict(normalize_gen_kwargs(request.args[1], default_max_gen_toks=256))
        tokenizer = self.text_tokenizer
        end = tokenizer.decode([self.eot_token_id], skip_special_tokens=False)
        until = handle_stop_sequences(options.pop("until", None), eos=end)
        most = int(options.pop("max_gen_toks"))
        if unknown := sorted(options.keys() - KNOWN):
            raise ValueError(
                f"task {request.task_name}: generation_kwargs {', '.join(unknown)} is not known; "
                f"there are until, max_gen_toks, {', '.join(sorted(KNOWN))}."
            )
        if not 0 < most < self.max_length:
            raise ValueError(
                f"task {request.task_name}: max_gen_toks is {most} (256 where a task does not say "
                f"it), and must be 1 to {self.max_length - 1}: the model has {self.max_length} "
                "positions. Lower it in the task's generation_kwargs."
            )
        draws = {name: options[name] for name in KNOWN - {"do_sample"} if name in options}
        how = GenerationOptions(
            most, stop=[text for text in until if text and text != end], seed=self.seed, **draws
        )
        room = self.max_length - most
        ids = [self.tok_encode(text)[-room:] or [self.prefix_token_id] for text in contexts]
        answers = self.ask(PromptDataset([Prompt(one, 0, 0)] for one in ids), how)
        decoded = [tokenizer.decode(one[one >= 0]) for one in answers["completion_ids"]]
        return [postprocess_generated_text(text, until, None) for text in decoded]


class EvaluationCLI(UnisonoCLI):
    """Command line that answers each list of lm-eval's requests by a prediction. `tasks` are
    folders, files and names; `to` is the folder of results, by default `evaluation` in the run
    folder; `how` are options of lm-eval's `simple_evaluate`."""

    needs_checkpoint = False  # a Hugging Face folder has weights, too

    def __init__(
        self, argv: list[str], choice: Any, tasks: list[str], to: str | None, **how: Any
    ) -> None:
        self.folder = Path(to).expanduser() if to else Path(choice.folder) / "evaluation"
        with usage_errors():
            if (self.folder / "results.json").exists():
                raise ValueError(
                    f"{self.folder / 'results.json'} is there and is never replaced; name another "
                    "folder with --to."
                )
            self.tasks = tasks_of(tasks)
        self.how, self.num_asked = how, 0
        super().__init__(argv, choice)

    def predict(self, **kwargs: Any) -> None:
        """Run the evaluation, with one prediction for each list of requests."""
        if not isinstance(self.model, LitCausalLM):
            raise UsageError(
                f"tasks are asked of language models, and this is a {type(self.model).__name__}; "
                "give a checkpoint of LitCausalLM."
            )
        path, pretrained = self.choice.ckpt_path, self.model.pretrained
        if path is not None:
            content = read_checkpoint(path, mmap=True, every_byte=False)
            recipe: Any = self.model.stored_recipe(content)
            tokenizer = TextTokenizer.from_dict(recipe["tokenizer"])
            config = text_config(recipe["network"])
        else:
            tokenizer = make_tokenizer(TokenizerOptions("folder", path=pretrained), iter(()))
            config = text_config(read_recipe(str(pretrained)))
        names = ("n_positions", "max_position_embeddings", "max_positions", "n_ctx")
        max_length = next(getattr(config, name) for name in names if hasattr(config, name))
        results = simple_evaluate(
            PlannedLM(tokenizer, max_length, self.ask, self.datamodule.seed),
            tasks=self.tasks,
            bootstrap_iters=100_000 if is_first_process() else 0,
            log_samples=True,
            **self.how,
        )
        if results is None or not self.trainer.is_global_zero:
            return
        results["config"] |= {"model": path or pretrained, "model_args": self.argv}
        text = json.dumps(results, indent=1, default=handle_non_serializable, ensure_ascii=False)
        write_whole(self.folder / "results.json", text + "\n")
        print("\n".join([*table(results), f"written to {self.folder / 'results.json'}"]))

    def ask(self, dataset: PromptDataset, options: GenerationOptions) -> dict[str, np.ndarray]:
        """Return the answers to requests on all processes; answers in an existing file are read."""
        data, model = self.datamodule, self.model
        self.num_asked += 1
        weights = Path(self.choice.ckpt_path or model.pretrained).expanduser()
        digests = [file_digest(p) for p in sorted(weights.rglob("*")) or [weights] if p.is_file()]
        facts = [dataset.fingerprint, vars(options), digests]
        data.requests, model.generation = dataset, options
        data.answers = self.folder / f"answers-{self.num_asked}-{digest_of(facts)[:12]}.npz"
        # All processes agree on this: the file is written while all of them predict.
        if not data.answers.exists():
            super().predict(model=model, datamodule=data)
            self.trainer.strategy.barrier("answers")
        with np.load(data.answers, allow_pickle=False) as answers:
            return dict(answers)


def tasks_of(named: Sequence[str]) -> list[Any]:
    """Return the tasks of folders, files and names.

    Raises:
        ValueError: a name is unknown, a folder has no task, or a task cannot be read.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # our own table says what matters
    folders = [name for name in named if Path(name).expanduser().is_dir()]
    known, names = TaskManager(include_path=folders, include_defaults=False), []
    for folder in folders:
        subtasks = TaskManager(include_path=folder, include_defaults=False).all_subtasks
        if not subtasks:
            raise ValueError(f"{folder} holds no task of lm-eval; write one as a .yaml file.")
        names += subtasks
    others = [name for name in named if name not in folders]
    if any(name not in known.all_tasks and not name.endswith(".yaml") for name in others):
        known = TaskManager(include_path=folders)  # with lm-eval's own, thousands of files
    for name in others:
        if name not in known.all_tasks and not Path(name).expanduser().is_file():
            near = did_you_mean(near_names(name, known.all_tasks))
            raise ValueError(
                f"{name} is no task, file or folder of tasks.{near} A folder of task files (.yaml) "
                "has its tasks in it."
            )
    tasks: dict[str, Any] = {}
    for name in [*names, *others]:
        say_first(f"task {name}")
        try:
            tasks |= known.load([name])["tasks"]
        except Exception as error:  # of any library that reads data
            raise ValueError(
                f"task {name} cannot be read: {str(error).splitlines()[0] or type(error).__name__}"
                ". Its data must be on this machine, such as dataset_path: json with "
                "dataset_kwargs: {data_files: {test: mine.jsonl}}, a path from the working folder."
            ) from error
    return list(tasks.values())


def table(results: Any) -> list[str]:
    """Return lines of 80 columns at most: each metric of each task, with its standard error."""
    lines = [f"{'task':<34}{'metric':<20}{'value':>12}{'± error':>12}"]
    for task, metrics in results["results"].items():
        for key, value in metrics.items():
            name, _, kind = key.partition(",")
            if kind and not name.endswith("_stderr"):
                error = metrics.get(f"{name}_stderr,{kind}")
                shown = [f"{v:.4f}" if isinstance(v, float) else "–" for v in (value, error)]
                label = name if kind == "none" else f"{name} ({kind})"
                lines.append(f"{task:<34.33}{label:<20.19}{shown[0]:>12}{shown[1]:>12}")
    return lines
