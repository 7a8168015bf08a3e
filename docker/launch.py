"""What Google's launcher of Flex Templates starts: with --NAME=VALUE for every parameter of a launch."""

from pipelines.commands.flex_template import main

main()
