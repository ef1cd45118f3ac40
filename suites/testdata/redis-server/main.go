// Command redis-server is a Redis server in Go, miniredis, behind the flags and the
// output by which test suites start the real one.
package main

import (
	"flag"
	"fmt"
	"net"
	"os"
	"os/signal"

	"github.com/alicebob/miniredis/v2"
)

func main() {
	port := flag.String("port", "6379", "")
	bind := flag.String("bind", "127.0.0.1", "")
	version := flag.Bool("version", false, "")
	for _, name := range []string{"save", "appendonly"} {
		flag.String(name, "", "taken, and without effect")
	}
	flag.Parse()
	if *version {
		fmt.Println("Redis server v=6.0.0 (miniredis)")
		return
	}
	interrupt := make(chan os.Signal, 1)
	signal.Notify(interrupt, os.Interrupt)
	m := miniredis.NewMiniRedis()
	if err := m.StartAddr(net.JoinHostPort(*bind, *port)); err != nil {
		fmt.Fprintln(os.Stderr, "redis-server:", err)
		os.Exit(1)
	}
	fmt.Println(" * Ready to accept connections")
	<-interrupt
	m.Close()
}
