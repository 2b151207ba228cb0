"""Templates by name, for models that bring none."""

from nemo_rl_cpp.data.chat_template import PASSTHROUGH


class COMMON_CHAT_TEMPLATES:  # noqa: N801 - the name that user code imports
    """`passthrough_prompt_response`: contents only. `simple_role_header`: a line with the role before each content."""

    passthrough_prompt_response = PASSTHROUGH
    simple_role_header = (
        "{% for message in messages %}{{ message['role'] | capitalize }}: {{ message['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}Assistant: {% endif %}"
    )
