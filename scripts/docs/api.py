"""Pages of the API reference: one in Markdown for each public header, from Doxygen's XML."""

import os
import re
import xml.etree.ElementTree as ElementTree


def code_of(listing):
    """The text of a <programlisting>."""
    lines = []
    for line in listing.findall("codeline"):
        for space in line.iter("sp"):
            space.text = " "
        lines.append("".join(line.itertext()))
    return "\n".join(lines)


def prose(element):
    """Paragraphs, lists and code of a description as Markdown."""
    parts = [element.text or ""]
    for child in element:
        if child.tag == "programlisting":
            parts.append("\n\n```cpp\n" + code_of(child) + "\n```\n\n")
        elif child.tag == "computeroutput":
            parts.append("`" + "".join(child.itertext()) + "`")
        elif child.tag == "listitem":
            parts.append("\n- " + prose(child).strip().replace("\n", "\n  "))
        elif child.tag in ("simplesect", "itemizedlist", "orderedlist"):
            parts.append("\n\n" + prose(child).strip() + "\n\n")
        elif child.tag == "para":
            parts.append("\n\n" + prose(child))
        elif child.tag in ("ndash", "mdash"):
            parts.append("--")
        else:
            parts.append(prose(child))
        parts.append(child.tail or "")
    return "".join(parts)


def description(node, *names):
    """The descriptions of a class or member in a row, without blank lines between them that mean nothing."""
    found = [node.find(name) for name in names or ("briefdescription", "detaileddescription")]
    texts = [prose(element) for element in found if element is not None]
    return re.sub(r"\n{3,}", "\n\n", "\n\n".join(text.strip() for text in texts if text.strip()))


def text_of(node, name):
    found = node.find(name)
    return "" if found is None else "".join(found.itertext()).strip()


def tidy(code):
    """C++ as the headers write it: Doxygen puts spaces into template arguments and takes them from defaults."""
    code = re.sub(r"\s+>", ">", re.sub(r"<\s+", "<", code))
    code = re.sub(r"\s([&*]+)\s?(?=\w)", r"\1 ", re.sub(r"\s([&*]+)(?=[,)])", r"\1", code))
    return re.sub(r"(?<=[\w\]])\s?=\s?(?=[\w{\"-])", " = ", code)


def wrapped(signature, width=100):
    if len(signature) <= width:
        return signature
    head, arguments = signature.split("(", 1)
    lines, line = [], head + "("
    for word in re.split(r"(?<=,) ", arguments):
        if len(line) + len(word) > width:
            lines.append(line.rstrip())
            line = "    "
        line += word + " "
    return "\n".join(lines + [line.rstrip()])


def signature(member):
    kind = member.get("kind")
    name = text_of(member, "name")
    if kind == "enum":
        values = [text_of(value, "name") for value in member.findall("enumvalue")]
        return "enum class " + name + " { " + ", ".join(values) + " };"
    if kind == "typedef":
        return "using %s = %s;" % (name, tidy(text_of(member, "type").removeprefix("typedef ")))
    template = member.find("templateparamlist")
    head = ""
    if template is not None:
        parameters = [(text_of(p, "type") + " " + text_of(p, "declname")).strip() for p in template.findall("param")]
        head = "template <" + ", ".join(parameters) + ">\n"
    arguments = text_of(member, "argsstring")
    if text_of(member, "initializer"):
        arguments += " = " + text_of(member, "initializer").lstrip("= ")
    return head + wrapped(tidy((text_of(member, "type") + " " + name).strip() + arguments + ";"))


def shown(member):
    """Not what only turns mistakes into sentences, nor what the compiler would write itself."""
    if member.get("kind") == "friend" or member.get("prot") != "public" or text_of(member, "name").startswith("~"):
        return False
    text = text_of(member, "definition") + text_of(member, "argsstring")
    return not any(part in text for part in ("Bare", "=delete", "->"))


def cell(text):
    return re.sub(r"\s+", " ", text).replace("|", "\\|")


def option_table(compound):
    """The members of a struct, group by group."""
    rows = []
    for section in compound.findall("sectiondef"):
        members = [m for m in section.findall("memberdef") if m.get("kind") == "variable" and shown(m)]
        if members and section.get("kind") == "user-defined":
            about = description(section, "description")
            rows.append("| **%s** | | | %s |" % (text_of(section, "header"), cell(about)))
        for member in members:
            default = tidy(text_of(member, "initializer").lstrip("= "))
            rows.append("| `%s` | `%s` | %s | %s |" % (text_of(member, "name"), cell(tidy(text_of(member, "type"))),
                                                     "`%s`" % cell(default) if default not in ("", "{}") else "",
                                                     cell(description(member))))
    return "| member | type | default | meaning |\n| --- | --- | --- | --- |\n" + "\n".join(rows) if rows else ""


def functions(members):
    """Signatures, each group of overloads with the comment that stands above the first."""
    groups = []
    for member in members:
        about = description(member)
        before = groups[-1] if groups else None
        if before and not about and (not before[1] or text_of(before[3], "name") == text_of(member, "name")):
            before[0].append(signature(member))
        else:
            groups.append(([signature(member)], about, member.get("kind"), member))
    parts = []
    for signatures, about, kind, member in groups:
        parts.append("```cpp\n" + "\n".join(signatures) + "\n```")
        if about:
            parts.append(about)
        if kind == "enum":
            values = [(text_of(v, "name"), description(v)) for v in member.findall("enumvalue")]
            if any(text for _, text in values):
                parts.append("\n".join("- `%s`: %s" % value for value in values))
    return "\n\n".join(parts)


def line_of(node):
    return int(node.find("location").get("line"))


def class_part(compound):
    name = text_of(compound, "compoundname").removeprefix("shoal::")
    bases = [tidy("".join(base.itertext())).replace("shoal::", "") for base in compound.findall("basecompoundref")]
    parts = ["## " + name]
    if bases:
        parts.append("`%s %s : %s`" % (compound.get("kind"), name, ", ".join(bases)))
    parts.append(description(compound))
    parts.append(option_table(compound))
    members = [m for m in compound.iter("memberdef") if m.get("kind") in ("function", "typedef", "enum") and shown(m)]
    parts.append(functions(sorted(members, key=line_of)))
    return "\n\n".join(part for part in parts if part)


def read(xml, name):
    return ElementTree.parse(os.path.join(xml, name + ".xml")).getroot().find("compounddef")


def header_page(xml, header, file, namespace):
    """file, namespace: the <compounddef> of the header and of namespace shoal."""
    pieces = []
    for inner in file.findall("innerclass"):
        if inner.text.count("::") != 1:  # of another class, or of shoal::detail
            continue
        compound = read(xml, inner.get("refid"))
        if description(compound) or compound.find("sectiondef") is not None:
            pieces.append((line_of(compound), class_part(compound)))
    starts = sorted(line for line, _ in pieces)
    free = {}  # functions and types, by the number of classes above them
    for member in sorted(namespace.iter("memberdef"), key=line_of):
        if member.find("location").get("file") == header and shown(member):
            free.setdefault(sum(start < line_of(member) for start in starts), []).append(member)
    for group in free.values():
        names = list(dict.fromkeys(text_of(m, "name") for m in group))
        title = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        pieces.append((line_of(group[0]), "## " + title + "\n\n" + functions(group)))
    body = "\n\n".join(text for _, text in sorted(pieces))
    return "# %s\n\n```cpp\n#include <%s>\n```\n\n%s\n\n%s\n" % (header, header, description(file), body)


def write_pages(xml, headers, folder):
    """headers: as programs include them."""
    os.makedirs(folder, exist_ok=True)
    namespace = read(xml, "namespaceshoal")
    files = {}
    for entry in os.listdir(xml):
        if entry.endswith("_8h.xml"):
            compound = read(xml, entry.removesuffix(".xml"))
            files[compound.find("location").get("file")] = compound
    for header in headers:
        name = os.path.basename(header).removesuffix(".h") + ".md"
        with open(os.path.join(folder, name), "w", encoding="utf-8") as page:
            page.write(header_page(xml, header, files[header], namespace))


def first_sentence(page):
    """What a page says first of its header."""
    with open(page, encoding="utf-8") as file:
        text = file.read().split("```\n", 2)[1].split("\n## ", 1)[0].strip()
    return cell(re.split(r"(?<=[a-z)]\.)\s", text.split("\n\n")[0], maxsplit=1)[0].rstrip("."))
