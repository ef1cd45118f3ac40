package main

import (
	"errors"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// panel is a part of the chart with a title of its own.
type panel struct {
	title  string
	series string // series is the name of the hollow dots, or empty if the panel has none.
	rows   []*row
}

// row is one case of a panel.
type row struct {
	name string
	unit string
	base string // base is the transport that rdmanet is compared with.

	plain  *point // plain has the filled dot. It is nil for a case that only the series has.
	series *point // series has the hollow dot, or is nil.
}

// point is one measured comparison. Its numbers are finite and positive.
type point struct {
	base    string // base is the figure of the other transport, as the table has it.
	rdmanet string // rdmanet is the figure of rdmanet, as the table has it.

	speed float64 // speed is how many times as fast as the other transport rdmanet is.
	low   float64 // low is the lower quartile of the speed.
	high  float64 // high is the upper quartile of the speed.
}

// moreIsBetter has the units that are known. It is true for rates and false for times.
var moreIsBetter = map[string]bool{"MB/s": true, "MiB/s": true, "/s": true, "µs": false}

var marker = regexp.MustCompile(`^<!-- chart: ([^;]+?)(?:; (.+?))? -->$`)

// parse returns the panels of a document, in the order of its tables.
func parse(doc string) ([]*panel, error) {
	var panels []*panel
	lines := strings.Split(strings.ReplaceAll(doc, "\r\n", "\n"), "\n")
	for i, line := range lines {
		if !strings.HasPrefix(line, "<!-- chart") {
			continue
		}
		m := marker.FindStringSubmatch(line)
		if m == nil {
			return nil, fmt.Errorf("line %d: not a comment for the chart: %s", i+1, line)
		}
		at := slices.IndexFunc(panels, func(p *panel) bool { return p.title == m[1] })
		if at < 0 {
			at = len(panels)
			panels = append(panels, &panel{title: m[1]})
		}
		if err := panels[at].add(lines[i+1:], m[2]); err != nil {
			return nil, fmt.Errorf("line %d: %s: %w", i+1, m[1], err)
		}
	}
	if len(panels) == 0 {
		return nil, errors.New("no table is marked for the chart")
	}
	return panels, nil
}

// add adds the rows of the table that lines begins with.
func (p *panel) add(lines []string, series string) error {
	if series != "" {
		if p.series != "" && p.series != series {
			return fmt.Errorf("a second series %q beside %q", series, p.series)
		}
		p.series = series
	}
	if n := slices.IndexFunc(lines, func(l string) bool { return !strings.HasPrefix(l, "|") }); n >= 0 {
		lines = lines[:n]
	}
	if len(lines) < 3 {
		return errors.New("no table with rows follows")
	}
	head := cells(lines[0])
	column := func(name string) int { return slices.Index(head, name) }
	tcp, against, it, rdmanet, ratio := column("TCP"), column("against"), column("it"), column("rdmanet"), column("ratio (quartiles)")
	if rdmanet < 0 || ratio < 0 || tcp < 0 && (against < 0 || it < 0) {
		return fmt.Errorf("a column is missing in: %s", lines[0])
	}
	label := ""
	for _, line := range lines[2:] {
		c := cells(line)
		if len(c) != len(head) {
			return fmt.Errorf("%d cells in place of %d: %s", len(c), len(head), line)
		}
		if c[0] != "" {
			label = c[0]
		}
		base, figure := "TCP", ""
		if tcp >= 0 {
			figure = c[tcp]
		} else if base, figure = c[against], c[it]; base != "TCP" && base != "UDP" {
			continue
		}
		r, err := p.row(label, base)
		if err != nil {
			return err
		}
		pt, err := newPoint(figure, c[rdmanet], c[ratio], moreIsBetter[r.unit])
		if err != nil {
			return fmt.Errorf("%w: %s", err, line)
		}
		into := &r.plain
		if series != "" {
			into = &r.series
		}
		if *into != nil {
			return fmt.Errorf("a second row for %q", label)
		}
		*into = pt
	}
	return nil
}

// row returns the row for a label and a base. It adds the row if there is none.
func (p *panel) row(label, base string) (*row, error) {
	at := strings.LastIndex(label, ", ")
	if at < 0 {
		return nil, fmt.Errorf("no unit in %q", label)
	}
	name, unit := label[:at], label[at+2:]
	if _, known := moreIsBetter[unit]; !known {
		return nil, fmt.Errorf("unknown unit in %q", label)
	}
	for _, r := range p.rows {
		if r.name == name && r.unit == unit && r.base == base {
			return r, nil
		}
	}
	r := &row{name: name, unit: unit, base: base}
	p.rows = append(p.rows, r)
	return r, nil
}

// newPoint makes a point of the cells of a row.
func newPoint(base, rdmanet, ratio string, more bool) (*point, error) {
	p := &point{}
	for _, f := range []struct {
		cell string
		to   *string
	}{{base, &p.base}, {rdmanet, &p.rdmanet}} {
		figure, _, _ := strings.Cut(f.cell, " (")
		if _, err := number(figure); err != nil {
			return nil, err
		}
		*f.to = figure
	}
	median, quartiles, found := strings.Cut(strings.TrimSuffix(ratio, ")"), " (")
	q1, q3, two := strings.Cut(quartiles, ", ")
	if !found || !two {
		return nil, fmt.Errorf("%q is no ratio with quartiles", ratio)
	}
	for _, f := range []struct {
		text string
		to   *float64
	}{{median, &p.speed}, {q1, &p.low}, {q3, &p.high}} {
		v, err := number(f.text)
		if err != nil {
			return nil, err
		}
		*f.to = v
	}
	if !more {
		p.speed, p.low, p.high = 1/p.speed, 1/p.high, 1/p.low
	}
	if p.low > p.speed || p.speed > p.high {
		return nil, fmt.Errorf("%q is not between its quartiles", ratio)
	}
	return p, nil
}

// number returns the positive number that text is.
func number(text string) (float64, error) {
	v, err := strconv.ParseFloat(text, 64)
	if err != nil || v <= 0 || math.IsInf(v, 0) || math.IsNaN(v) {
		return 0, fmt.Errorf("%q is no positive number", text)
	}
	return v, nil
}

// cells returns the cells of a line of a table, without the blanks around them.
func cells(line string) []string {
	c := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
	for i := range c {
		c[i] = strings.TrimSpace(c[i])
	}
	return c
}
