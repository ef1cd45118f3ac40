//go:build linux

package main

import (
	"bytes"
	"fmt"
	"math"
	"time"
)

// plot is three charts with the same time axis.
type plot struct {
	every  time.Duration
	points []sample
}

type sample struct {
	at time.Duration
	v  [3]float64
}

const maxSamples = 2000

// add adds a sample. There are never more than maxSamples: then every second one is
// removed.
func (p *plot) add(at time.Duration, rss, conns, failures float64) {
	if n := len(p.points); n > 0 && at-p.points[n-1].at < p.every {
		return
	}
	p.points = append(p.points, sample{at, [3]float64{rss, conns, failures}})
	if len(p.points) < maxSamples {
		return
	}
	for i := range p.points[:len(p.points)/2] {
		p.points[i] = p.points[2*i]
	}
	p.points = p.points[:len(p.points)/2]
	p.every = max(2*p.every, 2*time.Second)
}

// ceiling returns the least of 1, 2 and 5 times a power of ten that is not below v.
func ceiling(v float64) float64 {
	unit := math.Pow(10, math.Floor(math.Log10(max(v, 1))))
	for _, k := range []float64{1, 2, 5, 10} {
		if v <= k*unit {
			return k * unit
		}
	}
	return 10 * unit
}

func (p *plot) svg(device string) []byte {
	const width, height, left, top, gap = 900, 180, 90, 50, 70
	var b bytes.Buffer
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" font-size="12">`+"\n",
		left+width+30, top+3*(height+gap))
	fmt.Fprintf(&b, `<rect width="100%%" height="100%%" fill="white"/><text x="%d" y="20" font-size="15">soak on %s</text>`+"\n", left, device)
	end := time.Second
	if n := len(p.points); n > 0 {
		end = max(end, p.points[n-1].at)
	}
	unit, name := time.Second, "s"
	if end > 5*time.Minute {
		unit, name = time.Minute, "min"
	}
	for i, title := range []string{"resident memory of home, MiB", "connections of home that are open", "connections that failed, up to then"} {
		y0 := top + i*(height+gap)
		most := 1.0
		for _, s := range p.points {
			most = max(most, s.v[i])
		}
		most = ceiling(most)
		fmt.Fprintf(&b, `<text x="%d" y="%d">%s</text>`+"\n", left, y0-6, title)
		for k := range 5 {
			y := float64(y0) + height*(1-float64(k)/4)
			fmt.Fprintf(&b, `<path d="M%d %.1fh%d" stroke="#ddd"/><text x="%d" y="%.1f" text-anchor="end">%g</text>`+"\n",
				left, y, width, left-6, y+4, most*float64(k)/4)
			x := float64(left) + width*float64(k)/4
			fmt.Fprintf(&b, `<text x="%.1f" y="%d" text-anchor="middle">%.3g %s</text>`+"\n",
				x, y0+height+18, float64(end)*float64(k)/4/float64(unit), name)
		}
		fmt.Fprint(&b, `<polyline fill="none" stroke="#1f6fb4" stroke-width="1.5" points="`)
		for _, s := range p.points {
			fmt.Fprintf(&b, "%.1f,%.1f ", left+width*float64(s.at)/float64(end), float64(y0)+height*(1-s.v[i]/most))
		}
		fmt.Fprintln(&b, `"/>`)
	}
	fmt.Fprintln(&b, "</svg>")
	return b.Bytes()
}
