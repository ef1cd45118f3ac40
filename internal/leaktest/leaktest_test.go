package leaktest

import (
	"net"
	"strings"
	"testing"
	"time"
)

func TestNothingLeft(t *testing.T) {
	before := Take()
	done := make(chan struct{})
	go close(done)
	<-done
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ln.Close()
	if left := before.Left(patience); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

func TestGoroutineLeft(t *testing.T) {
	before := Take()
	stop := make(chan struct{})
	go func() { <-stop }()
	left := before.Left(time.Millisecond)
	close(stop)
	if len(left) != 1 || !strings.Contains(left[0], "TestGoroutineLeft") {
		t.Errorf("left: %q", left)
	}
	if left := before.Left(patience); len(left) > 0 {
		t.Errorf("left after it has ended: %q", left)
	}
}
