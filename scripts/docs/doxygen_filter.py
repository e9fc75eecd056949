"""Input filter of Doxygen: turns the headers' plain comments into documentation comments.

    python doxygen_filter.py HEADER
"""

import re
import sys

# Comments that open a group of options.
GROUP = re.compile(r"^ (Behaviour|Performance|Debugging)\.(?: (.*))?$")


def escaped(text):
    return re.sub(r"([\\@<>&#%])", r"\\\1", text).replace("--", "\\--")


def documentation(texts):
    """Prose with Doxygen's special characters escaped; lines indented by two more spaces as code."""
    lines, code = [], False
    for text in texts:
        if (text.startswith("  ")) != code and text.strip():
            code = not code
            lines.append("@code{.cpp}" if code else "@endcode")
        lines.append(text[3:] if code else escaped(text))
    return lines + ["@endcode"] if code else lines


def filtered(lines):
    result, number, group = [], 0, False
    while number < len(lines):
        line = lines[number]
        indent = re.match(r"\s*", line)[0]
        if line.strip().startswith("//"):
            texts = []
            while number < len(lines) and lines[number].strip().startswith("//"):
                texts.append(lines[number].strip()[2:])
                number += 1
            if result and result[-1] == "#pragma once":  # of the header as a whole
                result.append("/// @file")
            opens = GROUP.match(texts[0])
            if opens:
                result += [indent + "/// @}"] if group else []
                result.append(indent + "/// @name " + opens[1])
                group = True
                if opens[2]:  # of the group itself
                    result += [indent + "///" + text for text in documentation([" " + opens[2]] + texts[1:])]
                    texts = []
                else:
                    texts = texts[1:]
                result += [indent + "/// @{", ""]
            if group and texts and texts[0].startswith(" Throws "):
                result.append(indent + "/// @}")
                group = False
            result += [indent + "///" + text for text in documentation(texts)]
            continue
        number += 1
        trailing = re.match(r"^(.*?[;,{}:])\s+// (.*)$", line)
        if not trailing:
            if group and line.startswith("}"):
                result.append("/// @}")
                group = False
            result.append(line)
            continue
        text = trailing[2]
        while number < len(lines) and re.match(r"^\s{6,}// ", lines[number]):
            text += lines[number].strip()[2:]
            number += 1
        result.append(trailing[1] + "  ///< " + escaped(text))
    return result


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        print("\n".join(filtered(file.read().split("\n"))))


if __name__ == "__main__":
    main()
