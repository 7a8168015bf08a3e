# Write letters.toml beside this script: the Unicode properties by which the scripts of Moses classify characters.
# `make letters` runs it. It needs Perl 5.36, which has Unicode 14.0, and refuses any other version of Unicode.
use strict;
use warnings;
use feature 'unicode_strings';
use FindBin qw($RealBin);
use Unicode::UCD;

my $unicode = Unicode::UCD::UnicodeVersion();
if ($unicode ne "14.0.0") {
    die sprintf("Perl %vd has Unicode %s, expected 14.0.0: put Perl 5.36 first in PATH. Nothing was written\n", $^V, $unicode);
}

my @classes = (
    ["ALPHABETIC",  qr/\p{IsAlpha}/,          "letters, and the marks and numerals that count as letters: \\p{IsAlpha}"],
    ["CASED",       qr/[\p{Ll}\p{Lu}\p{Lt}]/, "letters of lower, upper or title case: \\p{Ll}, \\p{Lu}, \\p{Lt}"],
    ["DECIMAL",     qr/\p{Nd}/,               "decimal digits: \\p{Nd}; together with ALPHABETIC, \\p{IsAlnum}"],
    ["LOWER_CASE",  qr/\p{IsLower}/,          "lower-case characters: \\p{IsLower}"],
    ["NUMERIC",     qr/\p{IsN}/,              "digits, numerals and fractions: \\p{IsN}"],
    ["WHITE_SPACE", qr/\s/,                   "white space: \\s"],
);

my $text = "# Properties of characters in Unicode $unicode, written by Perl 5.36: run `make letters`, do not edit.\n"
    . "# Except for LOWER_OFFSETS, values are contents of character classes of Python's `re`.\n";

for my $class (@classes) {
    my ($name, $pattern, $description) = @$class;
    my @ranges;
    for my $code (code_points()) {
        next unless chr($code) =~ $pattern;
        if (@ranges && $ranges[-1][1] == $code - 1) { $ranges[-1][1] = $code } else { push @ranges, [$code, $code] }
    }
    my @pieces = map { escape($_->[0]) . ($_->[1] > $_->[0] ? ($_->[1] > $_->[0] + 1 ? "-" : "") . escape($_->[1]) : "") } @ranges;
    $text .= "\n# $description\n$name = '''\n" . join("", map { "$_\n" } wrapped("", 124, @pieces)) . "'''\n";
}

# Runs of characters at the same distance whose lower case is equally far away.
my @runs;
for my $code (code_points()) {
    my @lower = map { ord } split //, lc chr $code;
    next if @lower == 1 && $lower[0] == $code;
    next if $code == 0x130;
    die sprintf("the lower case of U+%04X has %d characters\n", $code, scalar @lower) if @lower > 1;
    my ($offset, $run) = ($lower[0] - $code, $runs[-1]);
    if ($run && $run->[3] == $offset && ($run->[2] ? $code - $run->[1] == $run->[2] : $code - $run->[1] <= 2)) {
        $run->[2] = $code - $run->[1];
        $run->[1] = $code;
    } else {
        push @runs, [$code, $code, 0, $offset];
    }
}
my @pieces = map { sprintf("[0x%X, 0x%X, %d, %d],", $_->[0], $_->[1], $_->[2] || 1, $_->[3]) } @runs;
$text .= "\n# First and last code point, step, and the offset of the lower case; without U+0130, whose lower case has two characters.\n"
    . "LOWER_OFFSETS = [\n" . join("", map { "    $_\n" } wrapped(" ", 122, @pieces)) . "]\n";

open(my $file, ">", "$RealBin/letters.toml") or die "$RealBin/letters.toml cannot be written: $!\n";
print $file $text;
close($file) or die "$RealBin/letters.toml cannot be written: $!\n";

sub code_points {
    return grep { $_ < 0xD800 || $_ > 0xDFFF } 0 .. 0x10FFFF;
}

sub escape {
    my ($code) = @_;
    return chr($code) if chr($code) =~ /^[A-Za-z0-9 ]$/;
    return sprintf($code < 0x100 ? "\\x%02x" : $code < 0x10000 ? "\\u%04x" : "\\U%08x", $code);
}

sub wrapped {
    my ($between, $width, @pieces) = @_;
    my @lines = ("");
    for my $piece (@pieces) {
        if (length($lines[-1]) + length($between . $piece) > $width) { push @lines, "" }
        $lines[-1] .= ($lines[-1] eq "" ? "" : $between) . $piece;
    }
    return @lines;
}
