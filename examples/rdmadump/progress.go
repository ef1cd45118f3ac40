package main

import (
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"golang.org/x/term"
)

// progress is a bar on a terminal that shows how much of a long file was read.
type progress struct {
	w     io.Writer // w is nil if there is no bar.
	src   *source
	begun time.Time
	shown time.Time
	steps int
	drawn bool
}

const longFile = 16 << 20 // longFile is the length in bytes from which on there is a bar.

func newProgress(wanted bool, src *source, w io.Writer) *progress {
	f, isFile := w.(*os.File)
	if !wanted || !isFile || !term.IsTerminal(int(f.Fd())) || src.size < longFile {
		return &progress{}
	}
	return &progress{w: w, src: src, begun: time.Now()}
}

// step is called for every packet. So it looks at the clock only now and then.
func (p *progress) step() {
	if p.w == nil {
		return
	}
	if p.steps++; p.steps%4096 != 0 {
		return
	}
	if now := time.Now(); now.Sub(p.shown) > 200*time.Millisecond {
		p.shown = now
		p.draw(now)
	}
}

func (p *progress) draw(now time.Time) {
	const width = 40
	done := float64(p.src.read) / float64(p.src.size)
	n := min(int(done*width), width)
	rate := float64(p.src.read) / 1e6 / now.Sub(p.begun).Seconds()
	fmt.Fprintf(p.w, "\r[%s%s] %3.0f %%, %.0f MB/s ", strings.Repeat("#", n), strings.Repeat(".", width-n), done*100, rate)
	p.drawn = true
}

// done removes the bar.
func (p *progress) done() {
	if p.drawn {
		fmt.Fprintf(p.w, "\r%s\r", strings.Repeat(" ", 70))
	}
}
