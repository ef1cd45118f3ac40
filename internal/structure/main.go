// Command structure counts how the parts of this module depend on each other.
//
// A room is a file of the root package, or one other package. Packages that are
// deeper than two folders belong to the room of those two folders. An arrow A -> B
// means that A uses a name that B defines: a type, function, method, field, constant
// or variable. An arrow counts once, however many names it has. Test files are left
// out, and so are files that are not built for linux/amd64 with cgo.
//
// A floor is a number, and a room is on a higher floor than all rooms that it uses.
// Files of one package may use each other in circles, where no such numbers exist. For
// each such circle the command looks for the order of its rooms in which the fewest
// arrows point from a lower room to a higher one. Those are the upward arrows. The
// search is a heuristic that always gives the same answer for the same files.
//
// The command prints the counts, the upward arrows with the names that they stand for,
// and the floors from the top, with the number of lines of each room. With -max N it
// exits with status 1 if there are more than N upward arrows.
package main

import (
	"bufio"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"
)

func main() {
	limit := flag.Int("max", -1, "fail when there are more upward arrows than this; -1 means no limit")
	dir := flag.String("C", ".", "root folder of the module to read")
	flag.Parse()
	if flag.NArg() > 0 {
		fmt.Fprintf(os.Stderr, "structure: unexpected argument %q\n", flag.Arg(0))
		os.Exit(2)
	}
	m, err := load(*dir)
	if err != nil {
		fmt.Fprintln(os.Stderr, "structure:", err)
		os.Exit(1)
	}
	r := examine(m)
	if err := r.print(os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "structure:", err)
		os.Exit(1)
	}
	if *limit >= 0 && len(r.upward) > *limit {
		fmt.Fprintf(os.Stderr, "structure: %d upward arrows, and at most %d are allowed: make structure lists them\n",
			len(r.upward), *limit)
		os.Exit(1)
	}
}

// A report is what the command prints about a module.
type report struct {
	module  *module
	circles [][]string // rooms of packages that import each other; the root package is one room here
	upward  []arrow
	floors  [][]string // from the lowest
}

// examine orders the rooms of m.
func examine(m *module) *report {
	r := &report{module: m}
	imports := newGraph(m.imports)
	for _, group := range imports.groups() {
		if len(group) > 1 {
			r.circles = append(r.circles, imports.namesOf(group))
		}
	}
	uses := newGraph(m.uses)
	order := uses.order()
	for _, up := range uses.upward(order) {
		r.upward = append(r.upward, arrow{uses.names[up[0]], uses.names[up[1]]})
	}
	for _, floor := range uses.floors(order) {
		r.floors = append(r.floors, uses.namesOf(floor))
	}
	return r
}

// print writes the report as text.
func (r *report) print(w io.Writer) error {
	b := bufio.NewWriter(w)
	files, arrows := 0, 0
	for room, used := range r.module.uses {
		if strings.HasSuffix(room, ".go") {
			files++
		}
		arrows += len(used)
	}
	fmt.Fprintf(b, "rooms: %d (%d files of the root package, %d of other packages)\n", len(r.module.uses), files, len(r.module.uses)-files)
	fmt.Fprintf(b, "arrows: %d\n", arrows)
	fmt.Fprintf(b, "import circles among packages: %d\n", len(r.circles))
	for _, circle := range r.circles {
		fmt.Fprintf(b, "  %s\n", strings.Join(circle, ", "))
	}
	fmt.Fprintf(b, "upward arrows: %d\n", len(r.upward))
	for _, up := range r.upward {
		fmt.Fprintf(b, "  %s -> %s: %s\n", up.from, up.to, strings.Join(r.module.names(up), ", "))
	}
	fmt.Fprintf(b, "floors from the top: %d\n", len(r.floors))
	for i := len(r.floors) - 1; i >= 0; i-- {
		fmt.Fprintf(b, "  floor %d\n", i+1)
		for _, room := range r.floors[i] {
			fmt.Fprintf(b, "    %-24s %5d lines\n", room, r.module.lines[room])
		}
	}
	return b.Flush()
}
