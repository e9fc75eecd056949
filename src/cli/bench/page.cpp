#include "cli/bench/page.h"

#include <fmt/format.h>

#include "cli/bench/svg.h"

namespace shoal::cli {
namespace {

// On a narrow screen, plots and tables scroll inside their frames instead of the page.
constexpr const char* style = R"(
body { font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; max-width: 66rem; margin: 2rem auto; padding: 0 1rem;
       color: #1b1f24; background: #fff; overflow-wrap: anywhere }
h1 { font-size: 1.6rem; margin-bottom: .3rem }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem }
.note { color: #57606a; margin: .3rem 0 }
.wide { overflow-x: auto }
svg { display: block; width: 100%; min-width: 40rem }
text { font: 12px system-ui, "DejaVu Sans", sans-serif; fill: #1b1f24 }
table { border-collapse: collapse; font-size: 12.5px; width: 100%; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .5rem; border-bottom: 1px solid #d8dee4; text-align: right; white-space: nowrap }
th { border-bottom: 2px solid #8b949e; vertical-align: bottom; white-space: normal; overflow-wrap: normal }
th.words, td.words { text-align: left }
tr:hover td { background: #f3f5f7 }
.legend { font-size: 12.5px; margin: .3rem 0 }
.legend span { display: inline-block; margin-right: 1.2rem }
.legend i { display: inline-block; width: 1.4rem; margin-right: .4rem; vertical-align: middle }
@media (prefers-color-scheme: dark) {
  :root { color-scheme: dark }
  body { color: #e6edf3; background: #0d1117 }
  .note { color: #9da7b1 }
  text { fill: #e6edf3 }
  line { stroke: #30363d }
  th, td { border-color: #30363d }
  tr:hover td { background: #161b22 }
}
)";

}  // namespace

std::string html_page(const std::string& title, const std::string& facts, const std::string& body) {
  return fmt::format(
      "<!DOCTYPE html>\n<html xmlns=\"http://www.w3.org/1999/xhtml\" lang=\"en\"><head><meta charset=\"utf-8\"/>"
      "<meta name=\"viewport\" content=\"width=device-width\"/><title>{0}</title><style>{1}</style></head>\n"
      "<body><h1>{0}</h1><p class=\"note\">{2}</p>\n{3}</body></html>\n",
      escaped(title), style, escaped(facts), body);
}

}  // namespace shoal::cli
