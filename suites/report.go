package main

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// report is the result of one suite.
type report struct {
	suite        suite
	tcp, rdmanet *results
	alone        map[string]bool // alone has the doubtful tests that passed over rdmanet when they were run alone.
	faults       []fault
	excused      []known
	took         time.Duration
}

// fault is a reason why the run fails.
type fault struct {
	text   string
	output []string
}

// judge compares the results over rdmanet with those over TCP and with the table.
func (r *report) judge(device string) {
	inGuest := device != "iwarp"
	met := make(map[string]bool)
	var missing []string
	for _, name := range r.names() {
		tcp, ours := r.tcp.of(name), r.rdmanet.of(name)
		ok := tcp == passed && ours == passed || tcp != failed && tcp != unfinished && (ours == passed || ours == tcp)
		k := r.find(name, inGuest)
		switch {
		case k != nil:
			met[name] = true
			if ok && !k.flaky {
				r.fault("%s is listed, and passes over both", nil, name)
			} else if k.cause != alsoTCP && tcp != passed {
				r.fault("%s is listed for a reason that TCP does not have, and %s over TCP", r.tcp.output[name], name, verb(tcp))
			} else if k.cause == alsoTCP && tcp == passed && !k.flaky {
				r.fault("%s is listed as one that does not pass over TCP, and does", nil, name)
			} else if !ok && k.flaky && tcp == passed && !r.alone[name] {
				r.fault("%s is listed as flaky, and passed over TCP, but over rdmanet not once in %d times alone", r.rdmanet.output[name], name, aloneTimes)
			} else if !ok {
				r.excused = append(r.excused, *k)
			}
		case ok:
		case (tcp == failed || ours == failed) && r.onlyListedBelow(name, inGuest):
		case tcp == failed || tcp == unfinished:
			r.fault("%s %s over TCP, %s over rdmanet, and is not listed", r.tcp.output[name], name, verb(tcp), verb(ours))
		case ours == absent:
			missing = append(missing, name)
		default:
			r.fault("%s %s over TCP, %s over rdmanet", r.rdmanet.output[name], name, verb(tcp), verb(ours))
		}
	}
	if len(missing) > 0 {
		// Usually the binary has ended early.
		r.fault("%d tests were not run over rdmanet, of those that were over TCP: %s and so on", nil, len(missing), missing[0])
	}
	for _, k := range r.suite.known {
		if !met[k.test] && (inGuest || !k.guest) {
			r.fault("%s is listed, and was not run over either", nil, k.test)
		}
	}
	for _, res := range []*results{r.tcp, r.rdmanet} {
		for _, text := range res.broken {
			r.fault("%s", nil, text)
		}
		if res.number(passed) == 0 {
			r.fault("no test passed", nil)
		}
	}
	r.judgeConnections(device)
}

// doubtful returns the tests that are listed as flaky and passed over TCP only. Some of
// them may never pass over rdmanet.
func (r *report) doubtful(inGuest bool) (names []string) {
	for _, name := range r.names() {
		k := r.find(name, inGuest)
		if k != nil && k.flaky && r.tcp.of(name) == passed && r.rdmanet.of(name) != passed {
			names = append(names, name)
		}
	}
	return names
}

// judgeConnections fails a run that was not over the device in question.
func (r *report) judgeConnections(device string) {
	if len(r.tcp.connections) > 0 {
		r.fault("the run over TCP made connections of rdmanet's", nil)
	}
	if len(r.rdmanet.connections) == 0 {
		r.fault("no connection over rdmanet was made", nil)
	}
	for name := range r.rdmanet.connections {
		if !strings.HasPrefix(name, device) {
			r.fault("connections were made over %s", nil, name)
		}
	}
}

// names returns all tests that were run over either transport, in order.
func (r *report) names() []string {
	all := maps.Clone(r.tcp.tests)
	maps.Copy(all, r.rdmanet.tests)
	return slices.Sorted(maps.Keys(all))
}

func (r *report) find(name string, inGuest bool) *known {
	for i, k := range r.suite.known {
		if k.test == name && (inGuest || !k.guest) {
			return &r.suite.known[i]
		}
	}
	return nil
}

// onlyListedBelow reports whether subtests of name failed and all of these are listed. Then
// they are the reason why name failed.
func (r *report) onlyListedBelow(name string, inGuest bool) bool {
	below := false
	for _, res := range []*results{r.tcp, r.rdmanet} {
		for sub, o := range res.tests {
			if !strings.HasPrefix(sub, name+"/") || o == passed || o == skipped {
				continue
			}
			if r.find(sub, inGuest) == nil && !r.onlyListedBelow(sub, inGuest) {
				return false
			}
			below = true
		}
	}
	return below
}

func (r *report) fault(format string, output []string, args ...any) {
	r.faults = append(r.faults, fault{fmt.Sprintf(format, args...), output})
}

func verb(o outcome) string {
	switch o {
	case skipped:
		return "is skipped"
	case unfinished:
		return "does not finish"
	case absent:
		return "is not run"
	}
	return string(o)
}

func (r *report) printFaults(w io.Writer) {
	for _, f := range r.faults {
		fmt.Fprintf(w, "FAULT: %s: %s\n", r.suite.name, f.text)
		for _, line := range f.output {
			fmt.Fprintf(w, "    %s", line)
		}
	}
}

// printSummary prints a table of all suites, with the failures that the table of known
// tests excuses.
func printSummary(w io.Writer, device string, reports []report) {
	fmt.Fprintln(w)
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintf(tw, "suite\tversion\tTCP: run\tpassed\tfailed\tskipped\t%s: run\tpassed\tfailed\tskipped\tconnections\ttime\t\n", device)
	for _, r := range reports {
		fmt.Fprintf(tw, "%s\t%s\t", r.suite.name, r.suite.version)
		for _, res := range []*results{r.tcp, r.rdmanet} {
			fmt.Fprintf(tw, "%d\t%d\t%d\t%d\t", len(res.tests), res.number(passed), res.number(failed, unfinished), res.number(skipped))
		}
		connections := 0
		for _, n := range r.rdmanet.connections {
			connections += n
		}
		verdict := "ok"
		if len(r.faults) > 0 {
			verdict = fmt.Sprintf("%d FAULTS", len(r.faults))
		}
		fmt.Fprintf(tw, "%d\t%.0f s\t%s\n", connections, r.took.Seconds(), verdict)
	}
	tw.Flush()
	for _, r := range reports {
		for _, k := range r.excused {
			fmt.Fprintf(w, "%s: %s: %s: %s\n", r.suite.name, k.test, k.cause, k.reason)
		}
	}
}
