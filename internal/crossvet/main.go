// Command crossvet type-checks the packages of a module for other systems and runs what go
// vet runs, all from source.
//
//	crossvet [-C dir] [-tests] goos/goarch... [-- package...]
//
// The go command would compile the standard library and all other dependencies for each
// system first, only to learn the types of what they export. That takes a minute a system,
// and this takes some seconds. What it cannot find is what only a compiler or a linker
// knows, so make cross builds for the same systems.
package main

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/tools/go/analysis/checker"
	"golang.org/x/tools/go/packages"
)

func main() {
	dir := flag.String("C", ".", "the `folder` of the module")
	tests := flag.Bool("tests", false, "check test files as well")
	flag.Parse()
	systems, patterns := flag.Args(), []string{"./..."}
	if i := slices.Index(systems, "--"); i >= 0 {
		systems, patterns = systems[:i], systems[i+1:]
	}
	ok := true
	for _, system := range systems {
		start := time.Now()
		problems, err := check(*dir, system, *tests, patterns)
		switch {
		case err != nil:
			fmt.Printf("%s: %v\n", system, err)
			ok = false
		case problems > 0:
			ok = false
		default:
			fmt.Printf("%s: ok, %.1f s\n", system, time.Since(start).Seconds())
		}
	}
	if !ok {
		os.Exit(1)
	}
}

// check prints what is wrong with the packages on a system, GOOS/GOARCH, and returns how
// many problems that were.
func check(dir, system string, tests bool, patterns []string) (problems int, err error) {
	goos, goarch, ok := strings.Cut(system, "/")
	if !ok {
		return 0, fmt.Errorf("a system is written as GOOS/GOARCH, for instance linux/arm64")
	}
	pkgs, err := packages.Load(&packages.Config{
		Mode:  packages.LoadAllSyntax | packages.NeedModule,
		Dir:   dir,
		Env:   append(os.Environ(), "GOOS="+goos, "GOARCH="+goarch, "CGO_ENABLED=0"),
		Tests: tests,
	}, patterns...)
	if err != nil {
		return 0, err
	}
	if len(pkgs) == 0 {
		return 0, fmt.Errorf("there are no packages %s", strings.Join(patterns, " "))
	}
	for _, p := range pkgs {
		for _, e := range p.Errors {
			fmt.Printf("%s: %v\n", system, e)
			problems++
		}
	}
	if problems > 0 {
		return problems, nil // Analyzers want packages without errors.
	}
	graph, err := checker.Analyze(analyzers, pkgs, nil)
	if err != nil {
		return 0, err
	}
	for action := range graph.All() {
		switch {
		case !action.IsRoot:
		case action.Err != nil:
			fmt.Printf("%s: %v: %v\n", system, action, action.Err)
			problems++
		default:
			for _, d := range action.Diagnostics {
				fmt.Printf("%s: %v: %s (%s)\n", system, action.Package.Fset.Position(d.Pos), d.Message, action.Analyzer.Name)
				problems++
			}
		}
	}
	return problems, nil
}
