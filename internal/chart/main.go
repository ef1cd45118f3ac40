// Command chart draws docs/performance.svg from the tables of docs/performance.md.
//
// A table is drawn if the line above its header is a comment of this form:
//
//	<!-- chart: PANEL -->
//	<!-- chart: PANEL; SERIES -->
//
// Tables with the same PANEL share one panel of the chart. The rows of a table with a
// SERIES have hollow dots, in the rows of the panel that have the same case. All other
// rows have filled dots.
//
// The columns are found by their names. The first column has the case and, behind its
// last comma, the unit; an empty cell stands for the case of the row above. The column
// "rdmanet" has rdmanet's figure. TCP's figure is in the column "TCP"; or it is in the
// column "it" of the rows that have TCP or UDP in the column "against", and other rows are
// not drawn. The column "ratio (quartiles)" has rdmanet divided by TCP.
//
// The chart shows how many times as fast as TCP rdmanet is. That is the ratio for rates,
// and the inverse of the ratio for times.
//
// The output depends on the tables only. With -check the command writes nothing and exits
// with status 1 if the chart is not that of the tables.
package main

import (
	"bytes"
	"flag"
	"fmt"
	"os"
)

func main() {
	in := flag.String("in", "docs/performance.md", "`file` with the tables")
	out := flag.String("out", "docs/performance.svg", "`file` with the chart")
	check := flag.Bool("check", false, "only check that the chart is that of the tables")
	flag.Parse()
	if flag.NArg() > 0 {
		fmt.Fprintf(os.Stderr, "chart: unexpected argument %q\n", flag.Arg(0))
		os.Exit(2)
	}
	if err := run(*in, *out, *check); err != nil {
		fmt.Fprintln(os.Stderr, "chart:", err)
		os.Exit(1)
	}
}

// run draws the chart of the tables in file in to file out, or compares it with that file.
func run(in, out string, check bool) error {
	doc, err := os.ReadFile(in)
	if err != nil {
		return err
	}
	panels, err := parse(string(doc))
	if err != nil {
		return fmt.Errorf("%s: %w", in, err)
	}
	want := draw(panels)
	if !check {
		return os.WriteFile(out, want, 0o644)
	}
	got, err := os.ReadFile(out)
	if err != nil {
		return err
	}
	if !bytes.Equal(got, want) {
		return fmt.Errorf("%s is not the chart of %s: run make chart", out, in)
	}
	return nil
}
