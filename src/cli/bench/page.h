#pragma once
// Pages that need nothing else: no script, no network.

#include <string>

namespace shoal::cli {

// Well-formed XHTML. `facts`: a line of text under the title; `body`: XHTML, whose plots and tables belong into
// <div class="wide">.
std::string html_page(const std::string& title, const std::string& facts, const std::string& body);

}  // namespace shoal::cli
