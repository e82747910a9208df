"""Labels of branches, over the histories that real clients send."""

import random

import pytest

from forge_jax.gateway.branches import Earlier, branch_of, talk_of
from forge_jax.gateway.messages import Conversation, Message, ToolCall
from forge_jax.types import Branch

BASH = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
READ = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}
TOOLS = (BASH, READ)
SYSTEM = "You are a coding agent. Keep a summary of what you do."


def system(text: str) -> Message:
    return Message(role="system", content=text)


def user(text: str) -> Message:
    return Message(role="user", content=text)


def says(text: str) -> Message:
    return Message(role="assistant", content=text)


def calls(arguments: str = '{"command": "ls"}', text: str = "", name: str = "bash") -> Message:
    call = ToolCall(id=f"call_{random.random()}", name=name, arguments=arguments)
    return Message(role="assistant", content=text, calls=(call,))


def result(text: str) -> Message:
    return Message(role="tool", content=text, extra={"tool_call_id": str(random.random())})


class Calls:
    """The calls of one session, each labelled as it comes."""

    def __init__(self) -> None:
        self.earlier: list[Earlier] = []

    def __call__(
        self,
        *messages: Message,
        tools: tuple = TOOLS,
        reply: Message | None = None,
        running: bool = False,
        branch: Branch | None = None,
    ) -> Branch:
        """`branch`: what was known of the call by its tokens or its body, else it is compared."""
        talk = talk_of(Conversation(messages=messages, tools=tools))
        found = branch or branch_of(talk, messages, self.earlier).branch
        replies = () if reply is None else (reply,)
        self.earlier.append(Earlier(talk=talk, branch=found, replies=replies, running=running))
        return found


TASK = [system(SYSTEM), user("List the files, please.")]
SUMMED = "The user wanted the files listed.\n\n- a.py was found\n- nothing else is left to do"


def main_loop(do: Calls, begin: list[Message] = TASK) -> list[Message]:
    """Two calls of an agent with tools, the first a call of a tool; gives its history."""
    do(*begin, reply=calls())
    talk = [*begin, calls(), result("a.py")]
    do(*talk, reply=says("There is a.py."), branch=Branch.CONTINUE)
    return [*talk, says("There is a.py.")]


def test_opencode_asks_for_a_title_before_or_beside_the_first_turn() -> None:
    title = [system("You are a title generator."), user("List the files, please.")]
    before = Calls()
    before(*title, tools=(), reply=says("Listing files"))
    assert before(system(SYSTEM), user("<env/>"), user("List the files, please.")) is Branch.ROOT
    beside = Calls()
    beside(*TASK, running=True)
    assert beside(*title, tools=()) is Branch.SIDE_CALL


def test_opencode_compacts_by_an_agent_of_its_own_and_begins_anew() -> None:
    do = Calls()
    talk = main_loop(do)
    ask = [system("You are a context summarization agent."), user("# Conversation\n..."), *talk[1:]]
    assert do(*ask, tools=(), reply=says(SUMMED)) is Branch.COMPACTION
    fresh = [system(SYSTEM), user("What did we do so far?"), says(SUMMED), user("Go on.")]
    assert do(*fresh, reply=calls('{"command": "pwd"}')) is Branch.COMPACTION
    # What comes behind the summary is a talk of its own.
    later = [*fresh, calls('{"command": "pwd"}'), result("/")]
    assert do(*later, tools=(BASH,)) is Branch.TOOLS_CHANGED


def test_codex_compacts_without_tools_and_goes_on_with_the_users_messages() -> None:
    do = Calls()
    talk = main_loop(do)
    ask = user("You are performing a CONTEXT CHECKPOINT COMPACTION. Create a handoff summary.")
    assert do(*talk, ask, tools=(), reply=says(SUMMED)) is Branch.COMPACTION
    handed = user(f"Another language model wrote this:\n{SUMMED}")
    assert do(*TASK, handed, reply=calls()) is Branch.COMPACTION


def test_claude_code_compacts_in_its_own_talk_and_begins_anew() -> None:
    do = Calls()
    talk = main_loop(do)
    ask = user("TEXT ONLY. Your task is to create a detailed summary of the conversation.")
    wrapped = f"<analysis>\nHm, let me think it over.\n</analysis>\n<summary>\n{SUMMED}\n</summary>"
    do(*talk, ask, reply=says(wrapped), branch=Branch.CONTINUE)
    fresh = user(f"This session is continued from a previous conversation.\n{SUMMED}")
    assert do(system(SYSTEM), fresh) is Branch.COMPACTION


def test_claude_code_has_sub_agents_of_other_prompts_and_fewer_tools() -> None:
    do = Calls()
    talk = main_loop(do)
    sub = [system("You are a search agent."), user("Find a.py")]
    assert do(*sub, tools=(READ,), reply=calls('{"f": 1}', name="read")) is Branch.SIDE_CALL
    deeper = [system("You are a planner."), user("Plan")]
    assert do(*deeper, tools=(READ,)) is Branch.SIDE_CALL
    assert do(*deeper, user("again"), tools=(READ,), branch=None) is not Branch.ROOT
    assert do(*talk, user("thanks"), tools=TOOLS, branch=None) is Branch.RERENDERED


def test_autogen_reflects_without_tools() -> None:
    do = Calls()
    do(*TASK, reply=calls())
    assert do(*TASK, calls(), result("a.py"), tools=()) is Branch.TOOLS_CHANGED


def test_smolagents_flattens_its_calls_to_text_and_plans_aside() -> None:
    do = Calls()
    do(*TASK, reply=calls())
    flat = [
        says("Calling tools:\n[{'id': 1, 'function': {'name': 'bash'}}]"),
        user("Observation:\na.py"),
    ]
    assert do(*TASK, *flat) is Branch.HISTORY_EDITED
    plan = [user("You are a world expert at planning. List the files, please.")]
    assert do(*plan, tools=()) is Branch.SIDE_CALL


def test_openai_agents_hand_over_to_another_prompt() -> None:
    do = Calls()
    talk = main_loop(do)
    other = [system("You are the refund agent."), *talk[1:], user("refund me")]
    assert do(*other) is Branch.SYSTEM_CHANGED
    assert do(*other, tools=(BASH,)) is Branch.TOOLS_CHANGED


def test_aider_asks_for_a_commit_message() -> None:
    do = Calls()
    do(system("Act as an expert developer."), user("Add a file"), tools=(), reply=says("a.py ..."))
    commit = [system("You write commit messages."), user("diff --git a/a.py")]
    assert do(*commit, tools=()) is Branch.SIDE_CALL


def test_messages_left_out_or_cut_are_told_from_others() -> None:
    long = [*TASK, calls(), result("a.py " * 99), calls('{"command": "pwd"}'), result("/")]
    late = [calls('{"command": "w"}'), result("me")]

    def after(*messages: Message) -> Branch:
        do = Calls()
        do(*long, reply=late[0])
        return do(*messages)

    assert after(*long[:2], *long[4:], *late) is Branch.TRUNCATED  # the middle
    assert after(long[0], *long[2:], *late) is Branch.TRUNCATED  # the beginning
    cleared = [*long[:3], result("[old output cleared]"), *long[4:], *late]
    assert after(*cleared) is Branch.TRUNCATED
    assert after(*long[:3], result("b.py " * 200), *long[4:], *late) is Branch.HISTORY_EDITED
    assert after(*long[:4]) is Branch.HISTORY_EDITED  # back to an earlier point
    assert after(*long, *late) is Branch.RERENDERED
    assert after(*long, calls('{"command": "rm"}'), result("")) is Branch.HISTORY_EDITED


def test_what_clients_rewrite_without_a_change_of_meaning_is_no_edit() -> None:
    do = Calls()
    do(*TASK, reply=calls('{"command": "ls", "t": 1.0}', text="I look."))
    again = calls('{ "t": 1,\n"command": "ls"}')  # keys, white space, numbers, text beside
    assert do(*TASK, again, result("a.py")) is Branch.RERENDERED


def test_the_same_talk_again_is_parallel_while_the_first_runs() -> None:
    do = Calls()
    do(*TASK, running=True)
    assert do(*TASK, running=True) is Branch.PARALLEL
    done = Calls()
    done(*TASK, reply=says("x"))
    assert done(*TASK) is Branch.REPEATED


def test_conversations_of_their_own_begin_afresh() -> None:
    do = Calls()
    assert do(*TASK) is Branch.ROOT
    assert do(system(SYSTEM), user("Another question.")) is Branch.FRESH
    plain = Calls()
    plain(user("Summarise A, please."), tools=(), reply=says("A is about something."))
    assert plain(user("Summarise B, please."), tools=()) is Branch.FRESH


@pytest.mark.parametrize("seed", range(50))
def test_any_history_has_a_label(seed: int) -> None:
    rng = random.Random(seed)
    pool = [system(SYSTEM), system("Other: compaction"), user("a"), user("summary of a"), says("b")]
    pool += [calls(), calls('{"x": [1, '), result("a"), result("a" * 99), says(SUMMED)]
    do = Calls()
    for _ in range(30):
        messages = [rng.choice(pool) for _ in range(rng.randrange(5))]
        reply = rng.choice([None, *pool[4:7], says(SUMMED)])
        label = do(*messages, tools=rng.choice([(), TOOLS]), reply=reply, running=reply is None)
        assert label not in (Branch.CONTINUE, Branch.RESENT, Branch.UNKNOWN)


def test_of_calls_that_share_as_much_the_one_of_these_tools_is_compared() -> None:
    do = Calls()
    do(*TASK, reply=calls())
    assert do(*TASK, tools=()) is Branch.TOOLS_CHANGED
    assert do(*TASK, says("Something else."), user("Go on.")) is Branch.HISTORY_EDITED


@pytest.mark.parametrize("told", ["", "I must think."])
def test_a_reply_that_was_a_thought_alone_may_have_been_told_as_text(told: str) -> None:
    do = Calls()
    do(*TASK, reply=Message(role="assistant", content="", thought="I must think."))
    assert do(*TASK, says(told), user("Go on.")) == "rerendered"
    assert do(*TASK, says("I must not, or so I think."), user("Go on.")) == "history_edited"
