//go:build linux

package main

import (
	"fmt"
	"io"
	"os"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Each connection that was given up excuses one other, and only one that was there already.
func TestExcuses(t *testing.T) {
	type ask struct {
		before, now uint64
		want        bool
	}
	for name, asks := range map[string][]ask{
		"nothing was given up":            {{0, 0, false}, {5, 5, false}},
		"one each":                        {{0, 1, true}, {0, 1, false}, {0, 2, true}, {0, 2, false}},
		"those of before excuse nothing":  {{50, 50, false}, {50, 51, true}, {50, 51, false}},
		"an old connection has the first": {{5, 6, true}, {2, 6, true}, {2, 6, true}, {2, 6, true}, {2, 6, false}},
	} {
		t.Run(name, func(t *testing.T) {
			var e excuses
			taken := 0
			for _, a := range asks {
				require.Equal(t, a.want, e.take(a.before, a.now), "%v", a)
				if a.want {
					taken++
				}
			}
			require.Equal(t, taken, e.taken())
		})
	}
}

// A connection that was given up excuses what it can have caused, and nothing else.
func TestForgivable(t *testing.T) {
	for _, tt := range []struct {
		kind kind
		err  error
		want bool
	}{
		{echo, syscall.ECONNRESET, true},
		{muxed, io.EOF, true},
		{bulk, io.EOF, false},
		{httpKind, fmt.Errorf("answer: %w", io.ErrUnexpectedEOF), false},
		{closed, fmt.Errorf("%w: it never arrived", errLost), true},
		{echo, os.ErrDeadlineExceeded, false},
		{echo, fmt.Errorf("%w: %w", errDial, syscall.ECONNRESET), false},
		{datagrams, io.EOF, false},
		{silent, syscall.ECONNRESET, false},
	} {
		t.Run(fmt.Sprint(kindNames[tt.kind], tt.err), func(t *testing.T) {
			assert.Equal(t, tt.want, forgivable(tt.kind, tt.err))
		})
	}
}
