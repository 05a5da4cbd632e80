"""A build setting that is true or false, as bazel_skylib's bool_flag."""

def _bool_flag_impl(_):
    return []

bool_flag = rule(
    implementation = _bool_flag_impl,
    build_setting = config.bool(flag = True),
    doc = "`--//package:name` on the command line; config_setting's flag_values read it.",
)
