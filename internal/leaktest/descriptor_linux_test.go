package leaktest

import (
	"net"
	"strings"
	"testing"
	"time"
)

func TestDescriptorLeft(t *testing.T) {
	before := Take()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	left := before.Left(time.Millisecond)
	ln.Close()
	if len(left) != 1 || !strings.Contains(left[0], "socket:") {
		t.Errorf("left: %q", left)
	}
}
