#pragma once
// Self-contained HTML pages: no script, no network.

#include <string>

namespace shoal::cli {

// Returns well-formed XHTML. facts: line of text under the title. body: XHTML; plots and tables belong in <div
// class="wide">.
std::string html_page(const std::string& title, const std::string& facts, const std::string& body);

}  // namespace shoal::cli
