"""The demo's start model: a 1M-parameter Qwen3 that can use the calculator, and often does not.

Invariant: the same code and seed give the same folder, an ordinary Hugging Face one; it is made once and cached.

Two things make a minute of CPU enough. The weights start with an induction circuit (Olsson et al. 2022, "In-context
learning and induction heads"): copying a number out of the task is what a small model is slowest to discover, and all
that the task needs besides. And the first half of the lessons are short (no system prompt) and free of bad moves.
"""

import hashlib
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import environment
import tasks
from slipstream.agent_loop.renderer import Renderer, create_renderer
from slipstream.learner.sft import Document, train_sft

HERE = Path(__file__).parent
RECIPE = ("start_model.py", "tasks.py", "environment.py", "chat_template.jinja")
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 128, 3, 4, 2, 64, 800
ROPE_THETA = 1e6
SHORT_STEPS, STEPS, BATCH, LEARNING_RATE = 220, 400, 12, 2e-3
RECITATIONS = 0.1  # of the short lessons
SLOPPY = 0.25  # chance of a bad move before each call: what reinforcement learning is left to mend
EXAMPLE = [  # for the tokenizer to learn its words from
    {"role": "system", "content": environment.SYSTEM},
    {"role": "user", "content": "Repeat: "},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"function": {"name": "calculator", "arguments": {"expression": "1 + 2 - 3 * 4"}}},
            {"function": {"name": "dictionary", "arguments": {"word": "a"}}},
        ],
    },
    {"role": "tool", "content": environment.define("apples")},
]


def ensure_start_model(folder: Path, on_step: Callable[[int, int, float], None]) -> bool:
    """Make the model in `folder` unless this very code made it before; True if it was made now.

    `on_step(step, steps, loss)` reports progress.
    """
    recipe = hashlib.sha256(b"".join(path.read_bytes() for path in (HERE / name for name in RECIPE))).hexdigest()
    stamp = folder / "recipe"
    if stamp.exists() and stamp.read_text() == recipe:
        return False
    shutil.rmtree(folder, ignore_errors=True)
    draft = folder.with_name(folder.name + ".untrained")
    save_untrained(draft)
    train_sft(
        model=draft,
        out=folder,
        batches=lessons(create_renderer(str(draft)), seed=0),
        steps=STEPS,
        lr=LEARNING_RATE,
        warmup=30,
        on_step=on_step,
    )
    stamp.write_text(recipe)
    return True


# -- what it is taught


def lessons(renderer: Renderer, seed: int) -> Iterator[list[Document]]:
    """One batch a step: short lessons first (recitations, and dialogues without a system prompt), whole ones after."""
    rng = random.Random(seed)
    for step in range(STEPS):
        short = step < SHORT_STEPS
        yield [
            recitation(renderer, rng)
            if short and rng.random() < RECITATIONS
            else dialogue(renderer, rng, whole=not short)
            for _ in range(BATCH)
        ]


def recitation(renderer: Renderer, rng: random.Random) -> Document:
    numbers = " ".join(str(rng.randrange(10, 99_999)) for _ in range(rng.randrange(2, 7)))
    lesson = Lesson(renderer, [{"role": "user", "content": f"Repeat: {numbers}"}], tools=False)
    lesson.say(numbers)
    return lesson.document


def dialogue(renderer: Renderer, rng: random.Random, *, whole: bool) -> Document:
    """One task worked through; a whole one now and then with a bad move: a guess, a wrong operator, a look-up that
    helps nobody, an early stop."""
    problem = tasks.draw_problem(rng, heldout=False)
    system = [{"role": "system", "content": environment.SYSTEM}] if whole else []
    lesson = Lesson(renderer, [*system, {"role": "user", "content": tasks.tell(problem, rng)}], tools=whole)
    value = problem.first
    for operator, number in problem.steps:
        sloppy = whole and rng.random() < SLOPPY
        move = rng.choice(("guess", "stop", "look up", "operator")) if sloppy else "right"
        if move == "guess":
            lesson.say(str(rng.randrange(100, 99_999)))
            return lesson.document
        if move == "stop":
            break
        if move == "look up":
            word = rng.choice(tasks.THINGS)
            lesson.call("dictionary", "word", word, environment.define(word))
        if move == "operator":
            operator = rng.choice([other for other in "+-*" if other != operator])
        expression = f"{value} {operator} {number}"
        value = environment.compute(expression)
        lesson.call("calculator", "expression", expression, str(value))
    lesson.say(str(value))
    return lesson.document


class Lesson:
    """A dialogue in the very tokens and masks that a rollout would have."""

    def __init__(self, renderer: Renderer, messages: list[dict[str, object]], *, tools: bool) -> None:
        self._renderer = renderer
        self._tools = environment.environment.tools if tools else []
        self.document = Document(token_ids=[], sampled=[])
        self._add(renderer.start(messages, self._tools), sampled=False)

    def say(self, text: str) -> None:
        self._add([*self._renderer.encode(text), self._renderer.stop_token_ids[0]], sampled=True)

    def call(self, tool: str, argument: str, value: str, result: str) -> None:
        self.say(f'<tool_call>\n{{"name": "{tool}", "arguments": {{"{argument}": "{value}"}}}}\n</tool_call>')
        answer = [{"role": "tool", "name": tool, "content": result}]
        self._add(self._renderer.extend(self.document.token_ids, answer, self._tools), sampled=False)

    def _add(self, ids: list[int], *, sampled: bool) -> None:
        self.document.token_ids.extend(ids)
        self.document.sampled.extend([sampled] * len(ids))


# -- what it is made of


def save_untrained(folder: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=HIDDEN,
            intermediate_size=3 * HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            max_position_embeddings=1_024,
            rope_theta=ROPE_THETA,
            tie_word_embeddings=True,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    plant_induction_circuit(model)
    model.save_pretrained(folder)


def build_tokenizer():
    """Byte-level BPE, learnt from what dialogues are made of, the template's own words included. Numbers fall into
    pairs of digits: half the tokens of single digits, and each pair is still seen often enough. Words keep their
    punctuation: JSON is then half as long."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    markers = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d{1,2}| ?[^\s\d]+|\s"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()

    def wrap():
        return PreTrainedTokenizerFast(
            tokenizer_object=core,
            eos_token="<|im_end|>",
            pad_token="<|endoftext|>",
            additional_special_tokens=["<|im_start|>"],
            chat_template=(HERE / "chat_template.jinja").read_text(),
            clean_up_tokenization_spaces=False,
        )

    rng = random.Random(0)
    texts = [tasks.tell(tasks.draw_problem(rng, heldout=False), rng) for _ in range(1_500)]
    texts += [f"{rng.randrange(10, 999_999)}" for _ in range(6_000)]
    frame = wrap().apply_chat_template(
        EXAMPLE,
        tools=[{"type": "function", "function": tool.schema} for tool in environment.environment.tools],
        tokenize=False,
    )
    for marker in [*special, *markers]:
        frame = frame.replace(marker, "\n")
    texts += [frame] * 50
    core.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    core.add_tokens([AddedToken(marker, normalized=False) for marker in markers])
    return wrap()


def plant_induction_circuit(model: torch.nn.Module) -> None:
    """Head 0 of layer 0 looks one token back and writes what it saw into a subspace of its own; head 0 of layer 1 looks
    for the place where that subspace holds the current token, and copies the token found there to the output.

    Looking back: constant queries and keys in the three fastest rotary frequencies, the query turned by one position
    (the constant is channel 0, the same in every embedding). Looking for content: only the slow frequencies, which turn
    little over the length of a dialogue.
    """
    generator = torch.Generator().manual_seed(1)

    def basis() -> torch.Tensor:  # [HEAD_DIM, HIDDEN], orthonormal rows
        return torch.linalg.qr(torch.randn(HIDDEN, HEAD_DIM, generator=generator))[0].T

    half = HEAD_DIM // 2
    frequency = 1 / ROPE_THETA ** (torch.arange(half) / half)
    fast = torch.zeros(HEAD_DIM)
    fast[:3] = fast[half : half + 3] = 1
    cos, sin = torch.cos(-frequency), torch.sin(-frequency)
    turned = torch.cat([fast[:half] * cos - fast[half:] * sin, fast[half:] * cos + fast[:half] * sin])
    slow = torch.nonzero(frequency < 3e-3)[:, 0]
    slow = torch.cat([slow, slow + half])
    token, previous, copied = basis(), basis(), basis()
    write = 0.2  # keeps what a head writes about as large as an embedding
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(0, 0.1, generator=generator)
        model.model.embed_tokens.weight[:, 0] = 0.5
        back, match = model.model.layers[0].self_attn, model.model.layers[1].self_attn
        for attention in (back, match):
            attention.q_norm.weight.fill_(2.0)  # sharper than at 1
            attention.k_norm.weight.fill_(2.0)
            attention.q_proj.weight[:HEAD_DIM] = 0
            attention.k_proj.weight[:HEAD_DIM] = 0
        back.q_proj.weight[:HEAD_DIM, 0], back.k_proj.weight[:HEAD_DIM, 0] = turned, fast
        back.v_proj.weight[:HEAD_DIM], back.o_proj.weight[:, :HEAD_DIM] = token, write * previous.T
        match.q_proj.weight[slow], match.k_proj.weight[slow] = token[slow], previous[slow]
        match.v_proj.weight[:HEAD_DIM], match.o_proj.weight[:, :HEAD_DIM] = copied, write * copied.T
