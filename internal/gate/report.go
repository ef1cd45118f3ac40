package main

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
)

// A report is what the gate prints in the end.
type report struct {
	steps   []*step
	seconds float64 // of the whole run
}

// These are how many lines of the first failure are printed, from its beginning and from
// its end. What matters must be within the last hundred lines of a log.
const (
	headLines = 30
	tailLines = 30
)

// failed returns the first step that has failed, nil if there is none.
func (r *report) failed() *step {
	for _, s := range r.steps {
		if s.result.Status == failed {
			return s
		}
	}
	return nil
}

func (r *report) flaky() (lines []string) {
	for _, s := range r.steps {
		lines = append(lines, s.result.Flaky...)
	}
	return lines
}

func (r *report) passed() bool {
	return r.failed() == nil && len(r.flaky()) <= mostFlaky
}

func (r *report) print(w io.Writer) {
	fmt.Fprintln(w)
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(table, "step\tresult\tseconds\ttests\trun again\tflaky\tskipped\t\n")
	count := make(map[status]int)
	skipped := make(map[string]int)
	for _, s := range r.steps {
		res := &s.result
		count[res.Status]++
		skips := 0
		for why, n := range res.Skipped {
			skipped[why] += n
			skips += n
		}
		fmt.Fprintf(table, "%s\t%s\t%.0f\t%d\t%d\t%d\t%d\t\n", s.name, res.Status, res.Seconds, res.Tests, res.Again, len(res.Flaky), skips)
	}
	fmt.Fprintf(table, "all\t\t%.0f\t\t\t\t\t\n", r.seconds)
	table.Flush()
	fmt.Fprintln(w)
	for _, why := range slices.Sorted(maps.Keys(skipped)) {
		fmt.Fprintf(w, "skipped: %d tests: %s\n", skipped[why], why)
	}
	for _, line := range r.flaky() {
		fmt.Fprintln(w, "flaky:", line)
	}
	if n := len(r.flaky()); n > mostFlaky {
		fmt.Fprintf(w, "FAILED: %d flaky tests, and at most %d are excused\n", n, mostFlaky)
	}
	if s := r.failed(); s != nil {
		fmt.Fprintf(w, "FAILED: %s: %s\n", s.name, shorten(s.result.Failure))
	}
	fmt.Fprintf(w, "%d passed, %d failed, %d skipped\n", count[passed], count[failed], count[notRun])
}

// shorten leaves out the middle of a long output.
func shorten(output string) string {
	lines := strings.Split(strings.TrimRight(output, "\n"), "\n")
	if left := len(lines) - headLines - tailLines; left > 0 {
		lines = slices.Concat(lines[:headLines],
			[]string{fmt.Sprintf("[%d lines are left out]", left)}, lines[len(lines)-tailLines:])
	}
	return strings.Join(lines, "\n")
}
