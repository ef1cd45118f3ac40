// Command suites runs the tests of other people's modules over rdmanet. These tests use a
// net.Conn much as users' programs do. Each suite runs unchanged over TCP first. Then its
// listeners and dials are replaced by rdmanet's, and it runs again. A test that passes over
// TCP must pass over rdmanet. All exceptions are in the table, with the reason.
//
//	go run . [-device iwarp|rxe|siw] [-quick] [-keep] [suite...]
//
// The go command fetches the modules, in the versions of table.go. They are changed in a
// temporary folder. -keep keeps that folder, and prints where it is.
//
// With rxe or siw both runs are in guests: see vm/README.md. Both copies then get the
// adaptations of table.go, so the run over TCP is not unchanged there.
package main

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"
)

func main() {
	device := flag.String("device", "iwarp", "what rdmanet runs on: `iwarp`, the software device; rxe or siw, in a guest")
	quick := flag.Bool("quick", false, "only the suites that every change runs")
	keep := flag.Bool("keep", false, "keep the temporary folder, and print where it is")
	flag.Usage = func() {
		fmt.Fprintln(flag.CommandLine.Output(), "usage: suites [flags] [suite...]")
		flag.PrintDefaults()
	}
	flag.Parse()
	ok, err := runAll(*device, *quick, *keep, flag.Args())
	if err != nil {
		fmt.Fprintln(os.Stderr, "suites:", err)
		os.Exit(2)
	}
	if !ok {
		os.Exit(1)
	}
}

func runAll(device string, quick, keep bool, names []string) (bool, error) {
	if !slices.Contains([]string{"iwarp", "rxe", "siw"}, device) {
		return false, fmt.Errorf("-device %s: want iwarp, rxe or siw", device)
	}
	chosen, err := choose(quick, names)
	if err != nil {
		return false, err
	}
	checkout, err := findCheckout()
	if err != nil {
		return false, err
	}
	temp, err := os.MkdirTemp("", "rdmanet-suites.")
	if err != nil {
		return false, err
	}
	if keep {
		fmt.Println("the temporary folder is", temp)
	} else {
		defer os.RemoveAll(temp)
	}
	var reports []report
	for _, s := range chosen {
		begin := time.Now()
		fmt.Printf("== %s %s\n", s.module, s.version)
		r, err := runSuite(s, device, checkout, temp)
		if err != nil {
			return false, fmt.Errorf("%s: %w", s.name, err)
		}
		r.took = time.Since(begin)
		r.printFaults(os.Stdout)
		reports = append(reports, r)
	}
	printSummary(os.Stdout, device, reports)
	return !slices.ContainsFunc(reports, func(r report) bool { return len(r.faults) > 0 }), nil
}

// choose returns the suites that are named, or all, or all quick ones.
func choose(quick bool, names []string) ([]suite, error) {
	for _, name := range names {
		if !slices.ContainsFunc(suites, func(s suite) bool { return s.name == name }) {
			return nil, fmt.Errorf("there is no suite %q", name)
		}
	}
	var chosen []suite
	for _, s := range suites {
		if (len(names) == 0 || slices.Contains(names, s.name)) && (s.quick || !quick) {
			chosen = append(chosen, s)
		}
	}
	if len(chosen) == 0 {
		return nil, fmt.Errorf("no suite is left to run")
	}
	return chosen, nil
}

// findCheckout returns the folder of the root module, which is above this one.
func findCheckout() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	checkout := filepath.Dir(dir)
	if _, err := os.Stat(filepath.Join(checkout, "suites", "shim")); err != nil {
		return "", fmt.Errorf("this is to be run in the folder suites of rdmanet's repository: %w", err)
	}
	return checkout, nil
}
