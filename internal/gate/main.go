// Command gate runs the steps that a change must pass, and says in the end what matters.
//
//	gate [-keep DIR] [-all] step...
//
// A step is a target of make. Steps that are joined by + run side by side, which is quicker
// where one of them mostly waits while another computes. A step that runs tests writes their
// events, as go test -json prints them, to files *.json in the folder that RDMANET_GATE names.
// By them the gate tells a defect from a busy machine:
//
//   - A test that failed and then passed, run again alone, is flaky. It is named in the end,
//     and the gate passes.
//   - A test that failed and has not passed since fails the gate. So does what no repetition
//     excuses: a data race, a panic, a fatal error of the runtime, and what package defect
//     reports, which is a leak, or bytes that are lost or wrong. More than five flaky tests
//     fail it, too.
//   - A test that passes and prints what looks like a panic or a data race fails it, as
//     gotestsum then runs nothing again.
//
// The tests are run again by what runs them (gotestsum --rerun-fails), twice at most. The
// gate only reads what came of it.
//
// The gate stops behind the first step that fails, and -all makes it go on. It ends its
// output with a table of the steps, the flaky tests, the tests that were skipped, and the
// first failure with its output.
//
// -keep names a folder for what was done, so that a run that was stopped goes on where it
// was. A step that has passed there is not run again while the files of the working tree are
// the same.
package main

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"
)

// mostFlaky is how many flaky tests a run may have.
const mostFlaky = 5

func main() {
	keep := flag.String("keep", "", "the `folder` that keeps what has passed; empty keeps nothing")
	all := flag.Bool("all", false, "go on behind a step that fails")
	flag.Parse()
	if flag.NArg() == 0 {
		flag.Usage()
		os.Exit(2)
	}
	passed, err := run(*keep, *all, flag.Args())
	if err != nil {
		fmt.Fprintln(os.Stderr, "gate:", err)
	}
	if err != nil || !passed {
		os.Exit(1)
	}
}

// run runs the steps, prints the report, and returns whether all have passed.
func run(keep string, all bool, names []string) (passed bool, err error) {
	dir := keep
	var tree func() (string, error)
	if keep == "" {
		if dir, err = os.MkdirTemp("", "gate"); err != nil {
			return false, err
		}
		defer os.RemoveAll(dir)
	} else {
		if dir, err = filepath.Abs(keep); err != nil {
			return false, err
		}
		tree = treeState
	}
	// A step that is interrupted fails, as its make gets the signal too. No other begins.
	interrupted := make(chan os.Signal, 1)
	signal.Notify(interrupted, os.Interrupt, syscall.SIGTERM)
	r := report{}
	start := time.Now()
	for _, joined := range names {
		var steps []*step
		for name := range strings.SplitSeq(joined, "+") {
			steps = append(steps, &step{name: name, dir: filepath.Join(dir, name), tree: tree})
		}
		if len(interrupted) > 0 || !all && r.failed() != nil {
			for _, s := range steps {
				s.result.Status = notRun
			}
		} else if err := sideBySide(steps, os.Stdout); err != nil {
			return false, err
		}
		r.steps = append(r.steps, steps...)
	}
	r.seconds = time.Since(start).Seconds()
	r.print(os.Stdout)
	return r.passed(), nil
}

// sideBySide runs steps at the same time. The output of the first goes to w while it runs,
// and that of the others behind it.
func sideBySide(steps []*step, w io.Writer) error {
	outputs := make([]bytes.Buffer, len(steps))
	errs := make([]error, len(steps))
	var others sync.WaitGroup
	for i, s := range steps[1:] {
		others.Go(func() { errs[i+1] = s.run(&outputs[i+1]) })
	}
	errs[0] = steps[0].run(w)
	others.Wait()
	for i := range outputs {
		if _, err := outputs[i].WriteTo(w); err != nil {
			return err
		}
	}
	return errors.Join(errs...)
}
